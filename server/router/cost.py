"""The cost of sending a request to a worker, in seconds. Pure.

    own_w  = c0 + (prompt tokens - matched tokens) / prefill rate
    wait_w = prefill seconds that come before its first token      (books.wait_s; books.shared_wait_s)
    room_w = seconds for which it waits until its blocks fit into the pool of w
    late_w = prefills at w that would wait for it                  (0 where they are computed one by one)
    rho    = min(.98, prefill seconds assigned to the fleet, decayed over 60 s, / (60 N))
    beta   = min(8, rho / (1 - rho))
    cost_w = wait_w + room_w + (1 + beta + late_w) * own_w + 0.03 * (prefill seconds assigned to w, decayed over 60 s)

room_w: requests hold their blocks until they end, for T seconds on average. A pool of B blocks has places for c = B / n
requests of n blocks. With the part u of it held, this request's blocks among them, all places are taken with about the
probability u ** (sqrt(2 (c + 1)) - 1), and then those who have them must end. Beyond u = 1 the pool must turn over:

    room_w = T * (min(u, 1) ** (sqrt(2 (c + 1)) - 1) + max(u - 1, 0))

It is nothing at a pool with places for many such requests until it is nearly full, and grows early at one with few.
Source: the probability of waiting in Sakasegawa, An approximation formula Lq = a b^r / (1 - r), Annals of the Institute
of Statistical Mathematics 29 (1977).

beta is the delay that one more second of work puts on the requests that will come, late_w on those that are there.
Capping rho matters: in overload an uncapped rho / (1 - rho) turns negative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    request_s: float = 0.01
    """c0: what a prefill costs beside its tokens."""
    window_s: float = 60.0
    max_rho: float = 0.98
    max_beta: float = 8.0
    recent_weight: float = 0.03
    """Spreads conversations before queues do: a worker on which they gather evicts them from its cache, and to move one
    later costs more than each of its turns would wait."""

    room_weight: float = 1.0
    """0.0: as if every pool had room."""

    def own_s(self, num_tokens: int, tokens_per_s: float) -> float:
        """Prefill seconds of `num_tokens` uncached tokens."""
        return self.request_s + num_tokens / tokens_per_s

    def beta(self, recent_s: float, num_workers: int) -> float:
        """`recent_s`: prefill seconds assigned to the fleet, decayed over the window."""
        rho = min(self.max_rho, recent_s / (self.window_s * num_workers))
        return min(self.max_beta, rho / (1.0 - rho))

    def room_s(self, usage: float, num_places: float, hold_s: float) -> float:
        """Expected wait for blocks, where `usage` of the pool is held with this request's blocks among them, the pool
        has places for `num_places` such requests, and blocks are held for `hold_s`."""
        usage = max(0.0, usage)
        bounded = min(1.0, usage)
        taken = math.pow(bounded, math.sqrt(2.0 * (max(1.0, num_places) + 1.0)) - 1.0)
        return self.room_weight * hold_s * (taken + usage - bounded)

    def cost_s(self, wait_s: float, own_s: float, recent_s: float, beta: float) -> float:
        return wait_s + (1.0 + beta) * own_s + self.recent_weight * recent_s
