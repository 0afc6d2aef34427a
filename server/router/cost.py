"""The cost of sending a request to a worker, in seconds. Pure.

    prefill_s = c0 + (prompt tokens - matched tokens) / prefill rate
    queue_s   = how long the prefills at the worker delay the first token     (WorkerLoadEstimate.queue)
    kv_wait_s = how long the request waits until its blocks fit into the pool
    displaced = prefills at the worker that it would delay                    (0 where they run one by one)
    rho       = min(.98, prefill seconds assigned to the fleet, decayed over 60 s, / (60 N))
    beta      = min(8, rho / (1 - rho))
    cost      = queue_s + kv_wait_s + (1 + beta + displaced) * prefill_s
                + 0.03 * (prefill seconds assigned to the worker, decayed over 60 s)

kv_wait_s: requests hold their blocks until they end, for T seconds on average. A pool of B blocks has c = B / n slots
for requests of n blocks. With the share u of it held, this request included, all slots are taken with a probability of
about u ** (sqrt(2 (c + 1)) - 1). Beyond u = 1 the pool must turn over:

    kv_wait_s = T * (min(u, 1) ** (sqrt(2 (c + 1)) - 1) + max(u - 1, 0))

It is close to 0 until a pool with many slots is nearly full, and grows early in one with few.
Source: the probability of waiting in Sakasegawa, An approximation formula Lq = a b^r / (1 - r), Annals of the Institute
of Statistical Mathematics 29 (1977).

beta is the delay that one more second of work puts on requests that will arrive, `displaced` on those already there. An
uncapped rho / (1 - rho) turns negative in overload.
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
        """Return beta; `recent_s` are the prefill seconds assigned to the fleet, decayed over the window."""
        rho = min(self.max_rho, recent_s / (self.window_s * num_workers))
        return min(self.max_beta, rho / (1.0 - rho))

    def kv_wait_s(self, usage: float, num_slots: float, mean_residency_s: float) -> float:
        """Return the expected wait for blocks at a pool of which `usage` is held, this request's blocks included."""
        usage = max(0.0, usage)
        bounded = min(1.0, usage)
        taken = math.pow(bounded, math.sqrt(2.0 * (max(1.0, num_slots) + 1.0)) - 1.0)
        return self.kv_wait_weight * mean_residency_s * (taken + usage - bounded)

    def cost_s(self, wait_s: float, prefill_s: float, recent_s: float, beta: float) -> float:
        return wait_s + (1.0 + beta) * prefill_s + self.recent_weight * recent_s
