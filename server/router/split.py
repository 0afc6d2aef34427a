"""Prefill and decode apart: the prompt and the first token at a worker of role "prefill", the rest at another one.

    stay_s      cost at the best other worker, and what the prefill costs the decodes there
    handover_s  blocks that this worker lacks / its fetch rate, and the start of a request there
    split_s     cost of the prompt at the cheapest worker of role "prefill" + (1 + beta) * handover_s
                + wait for room and evictions at this worker

A split pays where `split_s` is below `stay_s`. The second worker is chosen again after the prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from server.router.cost import WorkerView
from server.router.types import RouteRequest

if TYPE_CHECKING:
    from server.router.policies import FleetView

PREFILL_ONLY: Final = "takes only prompts (--role prefill)"
"""The guard of a worker of this role, where nothing else keeps it from the request."""


class Split(msgspec.Struct, frozen=True, eq=False):
    """The cheapest split of a request."""

    prefill: WorkerView
    """Where the prompt would be computed."""
    decode: WorkerView
    """The worker that it is compared with, and would go on at."""
    handover_s: float
    split_s: float
    stay_s: float

    @property
    def pays(self) -> bool:
        return self.split_s < self.stay_s


def cheapest_split(
    request: RouteRequest, workers: Sequence[WorkerView], best: Sequence[WorkerView], fleet: FleetView
) -> Split | None:
    """Return the cheapest split with one of the `best` workers. None: no pair fits."""
    if not request.may_split or request.hard_affinity or request.numerics is not None or not best:
        return None
    decode, cost = best[0], fleet.cost
    member, rate = decode.member, decode.load.fetch_tokens_per_s
    prefills = [
        worker
        for worker in workers
        if worker.guard is PREFILL_ONLY
        and (worker.member.numerics, worker.member.layout) == (member.numerics, member.layout)
        and (request.ttft_budget_s is None or worker.predicted_ttft_s <= request.ttft_budget_s)
    ]
    if not prefills or not rate or not member.layout:
        return None
    beta = cost.beta(fleet.assigned_s, fleet.num_workers)
    prefill_beta = cost.beta(sum(worker.assigned_s for worker in prefills), len(prefills))
    prefills_s = [
        cost_s + worker.report_age_s * fleet.draw()
        for worker, cost_s in zip(prefills, cost.costs_s(prefills, prefill_beta), strict=True)
    ]
    least_s = min(prefills_s)
    num_full = len(request.hashes) * member.block_size
    transfer_s = max(0, num_full - decode.matched_tokens) / rate
    handover_s = transfer_s + cost.prefill_s(request.num_prompt_tokens - num_full, decode.prefill_tokens_per_s)
    stay_s = (decode.score or 0.0) + cost.decode_weight * decode.num_decoding * decode.prefill_s
    prefill = prefills[prefills_s.index(least_s)]
    room_s = decode.kv_wait_s + decode.eviction_s  # its blocks take room at both
    return Split(prefill, decode, handover_s, least_s + room_s + (1.0 + beta) * handover_s, stay_s)
