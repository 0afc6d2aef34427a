"""The cost of sending a request to a worker, in seconds. Pure.

    own_w  = c0 + (prompt tokens - matched tokens) / prefill rate
    wait_w = prefill seconds that come before its first token      (books.wait_s; books.shared_wait_s)
    late_w = prefills at w that would wait for it                  (0 where they are computed one by one)
    rho    = min(.98, prefill seconds assigned to the fleet, decayed over 60 s, / (60 N))
    beta   = min(8, rho / (1 - rho))
    cost_w = wait_w + (1 + beta + late_w) * own_w + 0.1 * (prefill seconds assigned to w, decayed over 60 s)

beta is the delay that one more second of work puts on the requests that will come, late_w on those that are there.
Capping rho matters: in overload an uncapped rho / (1 - rho) turns negative.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    request_s: float = 0.01
    """c0: what a prefill costs beside its tokens."""
    window_s: float = 60.0
    max_rho: float = 0.98
    max_beta: float = 8.0
    recent_weight: float = 0.1
    """Spreads conversations before queues do: a worker on which they gather evicts them from its cache, and to move one
    later costs more than each of its turns would wait."""

    def own_s(self, num_tokens: int, tokens_per_s: float) -> float:
        """Prefill seconds of `num_tokens` uncached tokens."""
        return self.request_s + num_tokens / tokens_per_s

    def beta(self, recent_s: float, num_workers: int) -> float:
        """`recent_s`: prefill seconds assigned to the fleet, decayed over the window."""
        rho = min(self.max_rho, recent_s / (self.window_s * num_workers))
        return min(self.max_beta, rho / (1.0 - rho))

    def cost_s(self, wait_s: float, own_s: float, recent_s: float, beta: float) -> float:
        return wait_s + (1.0 + beta) * own_s + self.recent_weight * recent_s
