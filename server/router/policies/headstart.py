"""The design's cost, in seconds: see `server.router.cost`.

With several gateways one thing is added. What others sent since a worker's last report is unknown, and every gateway
sees the same idle workers and breaks ties the same way, so they would all take the same one. Costs therefore get a
random part as large as the report is old. Simulated with 4 gateways on the conversations, mean TTFT with reports
50 / 250 / 1,000 ms old: 1.47 / 1.60 / 2.01 s without it, 1.43 / 1.52 / 1.74 s with it, one gateway 1.39 s.
"""

from __future__ import annotations

from collections.abc import Sequence

from server.router.placement import RouteRequest
from server.router.policies.base import FleetView, Option, StatelessPolicy


class Headstart(StatelessPolicy):
    def scores(self, request: RouteRequest, options: Sequence[Option], fleet: FleetView) -> Sequence[float]:
        beta = fleet.cost.beta(fleet.recent_s, fleet.num_workers)
        cost_s = fleet.cost.cost_s
        return [
            cost_s(option.wait_s, option.own_s, option.recent_s, beta)
            + (option.unseen_s * fleet.draw() if option.unseen_s else 0.0)
            for option in options
        ]
