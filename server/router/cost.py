"""The cost of sending a request to a worker, in seconds. Pure. docs/routing.md says what each term is for.

rho  = min(.98, prefill seconds assigned to the fleet, decayed over 60 s, / (60 N))
beta = min(8, rho / (1 - rho))
cost = queue_s + kv_wait_s + (1 + beta + num_displaced) * prefill_s + 0.03 * recent prefill seconds of the worker
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """The cost's constants."""

    request_s: float = 0.01
    """c0: the fixed part of a prefill."""
    window_s: float = 60.0
    max_rho: float = 0.98
    max_beta: float = 8.0
    recent_weight: float = 0.03
    """Spreads conversations before queues do. Conversations that gather on a worker evict each other from its cache,
    and moving one later costs more than each of its turns would wait."""

    kv_wait_weight: float = 1.0
    """0.0 ignores the fill of the pools."""

    def prefill_s(self, num_tokens: int, tokens_per_s: float) -> float:
        """Return the prefill seconds of `num_tokens` uncached tokens."""
        return self.request_s + num_tokens / tokens_per_s

    def beta(self, recent_s: float, num_workers: int) -> float:
        """Return the delay that one more second of work puts on later requests; uncapped, it diverges in overload.

        `recent_s`: prefill seconds assigned to the fleet, decayed over the window.
        """
        rho = min(self.max_rho, recent_s / (self.window_s * num_workers))
        return min(self.max_beta, rho / (1.0 - rho))

    def kv_wait_s(self, usage: float, num_slots: float, mean_residency_s: float) -> float:
        """Return the expected wait for blocks at a pool of which `usage` is held, this request's blocks included.

        The pool has slots for `num_slots` such requests. All are taken with a probability of about
        usage ** (sqrt(2 (num_slots + 1)) - 1); beyond usage = 1 the pool must turn over.
        Source: Sakasegawa, An approximation formula Lq = a b^r / (1 - r), Ann. Inst. Statist. Math. 29 (1977).
        """
        usage = max(0.0, usage)
        bounded = min(1.0, usage)
        taken = math.pow(bounded, math.sqrt(2.0 * (max(1.0, num_slots) + 1.0)) - 1.0)
        return self.kv_wait_weight * mean_residency_s * (taken + usage - bounded)
