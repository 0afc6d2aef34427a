"""llm-d's weighted scorers, prefix 2, KV utilisation 1, queue 1: the published sample configuration.

prefix = matched / total blocks;  kv = 1 - usage;  queue = (longest - own) / (longest - shortest).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.router.placement import RouteRequest
from server.router.policies.base import FleetView, Option, StatelessPolicy


@dataclass(frozen=True, slots=True)
class LlmD(StatelessPolicy):
    prefix_weight: float = 2.0
    kv_weight: float = 1.0
    queue_weight: float = 1.0

    def scores(self, request: RouteRequest, options: Sequence[Option], fleet: FleetView) -> Sequence[float]:
        longest = max(option.num_waiting for option in options)
        shortest = min(option.num_waiting for option in options)
        total = max(1, request.num_prompt_tokens)
        scores = []
        for option in options:
            queue = (longest - option.num_waiting) / (longest - shortest) if longest > shortest else 1.0
            prefix = option.matched_tokens / total
            score = self.prefix_weight * prefix + self.kv_weight * (1.0 - option.kv_usage) + self.queue_weight * queue
            scores.append(-score)
        return scores
