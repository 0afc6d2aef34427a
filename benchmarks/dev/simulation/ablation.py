"""The policy `headstart` without one term of its cost, to measure what each is worth."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec

from server.router.cost import WorkerView
from server.router.policies import FleetView, Headstart, Policy
from server.router.types import RouteRequest

CONSTANTS: Final = {"beta": "max_rho", "recent": "assigned_weight"}
"""Those of the cost that are 0 without a term."""
TERMS: Final = ("queue_s", "num_displaced", "eviction_s", "decode_s", "fetch_cost_s")


class Without(Headstart):
    """`term`: one of the above, `idle` for the price of an idle best match, or `affinity`."""

    def __init__(self, term: str) -> None:
        self._term = term

    def scores(self, request: RouteRequest, workers: Sequence[WorkerView], fleet: FleetView) -> Sequence[float]:
        term = self._term
        if term in TERMS:
            workers = [msgspec.structs.replace(worker, **{term: 0.0}) for worker in workers]
        elif term in CONSTANTS:
            fleet = msgspec.structs.replace(fleet, cost=replace(fleet.cost, **{CONSTANTS[term]: 0.0}))
        elif term == "idle":
            fleet = msgspec.structs.replace(fleet, common_tokens=sys.maxsize)  # no match is longer
        else:
            request = msgspec.structs.replace(request, affinity_key=None)
        return super().scores(request, workers, fleet)


WITHOUT: Final[Mapping[str, Callable[[], Policy]]] = {
    f"without_{term}": partial(Without, term) for term in (*CONSTANTS, *TERMS, "idle", "affinity")
}
