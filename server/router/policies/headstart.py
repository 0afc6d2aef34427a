"""The design's cost, in seconds: see `server.router.cost`."""

from __future__ import annotations

from collections.abc import Sequence

from server.router.placement import RouteRequest
from server.router.policies.base import FleetView, Option, StatelessPolicy


class Headstart(StatelessPolicy):
    def scores(self, request: RouteRequest, options: Sequence[Option], fleet: FleetView) -> Sequence[float]:
        beta = fleet.cost.beta(fleet.recent_s, fleet.num_workers)
        cost_s = fleet.cost.cost_s
        return [cost_s(option.wait_s, option.own_s, option.recent_s, beta) for option in options]
