"""Dynamo's cost in blocks: overlap weight x potential prefill blocks + potential active blocks, least wins.

Prefill is charged whole until the first token; nothing is taken off for what has elapsed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.router.placement import RouteRequest
from server.router.policies.base import FleetView, Option, StatelessPolicy


@dataclass(frozen=True, slots=True)
class Dynamo(StatelessPolicy):
    overlap_weight: float = 1.0

    def scores(self, request: RouteRequest, options: Sequence[Option], fleet: FleetView) -> Sequence[float]:
        scores = []
        for option in options:
            block_size = option.member.block_size
            prefill_s = option.queued_s + option.own_s
            prefill_blocks = prefill_s * option.prefill_tokens_per_s / block_size
            scores.append(self.overlap_weight * prefill_blocks + option.active_blocks)
        return scores
