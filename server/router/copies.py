"""Copies on purpose: a chain of blocks gets another home before the workers that hold it are full.

    demand    prefill seconds a second of the requests whose longest match is the chain, by the number of its holders
    wait_s    the wait at the least busy holder, and what demand above FULL adds to it within HORIZON_S
    copy_s    the time to fetch the blocks, and the price of those that they evict at the target

The chain is copied if wait_s exceeds copy_s. A fetch plan moves the same blocks, but a request waits for them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from cache.records import WorkerMember
from cache.types import BlockHash, WorkerId
from server.metrics import GatewayMetrics
from server.rates import DecayedSum
from server.router.cost import WorkerView
from server.router.placement import Decision, Placement, PlacementListener
from server.workers.connection import WorkerLost

logger = logging.getLogger(__name__)

SendCopy = Callable[[str, WorkerMember, BlockHash, Sequence[BlockHash]], Awaitable[int]]
"""`WorkerClient.adopt`."""
FULL: Final = 0.5
"""The share of a holder's time that the requests of one chain may take: the other half is for others."""
HORIZON_S: Final = 10.0  # demand that ends sooner is not worth a copy
WINDOW_S: Final = 2.0  # of the smoothed demand: short, as copies pay while a rate grows (RESULTS.md)
MIN_REQUESTS: Final = 8.0
"""A chain with fewer requests in the window has no demand."""
REST_S: Final = 2.0
"""The time after a copy of a chain in which no other one begins: the index may not have it yet, or it failed."""
MAX_CHAINS: Final = 1024
"""Chains whose demand is remembered."""


class CopyPlan(msgspec.Struct, frozen=True, eq=False):
    """Another home for a chain."""

    hashes: Sequence[BlockHash]
    root: BlockHash
    source: WorkerMember
    target: WorkerMember
    num_tokens: int
    """Those that the target lacks."""
    demand: float
    wait_s: float
    copy_s: float


@dataclass(slots=True, eq=False)
class _Demand:
    """The latest requests of a chain."""

    prefill_s: DecayedSum = field(default_factory=lambda: DecayedSum(WINDOW_S))
    num_requests: DecayedSum = field(default_factory=lambda: DecayedSum(WINDOW_S))
    rests_until_s: float = -math.inf
    """When the next copy may begin."""


class CopyPlanner:
    """Follows the demand for each chain, and plans copies."""

    def __init__(self, clock: Callable[[], float], max_copies: int) -> None:
        """`max_copies`: in flight, of which each worker gets one."""
        self._clock = clock
        self._max_copies = max_copies
        self._demands: dict[BlockHash, _Demand] = {}
        """By the chain's last block, the least recently requested first."""
        self._in_flight: dict[BlockHash, WorkerId] = {}

    def placed(self, decision: Decision) -> CopyPlan | None:
        """Count a request that has been placed. Return the copy of its longest match that begins now, or None."""
        if not self._max_copies or not decision.request.root or not decision.best[0].load.fetch_tokens_per_s:
            return None
        num_blocks, holders = _longest_match(decision)
        if not num_blocks:
            return None
        last, now_s = decision.request.hashes[num_blocks - 1], self._clock()
        demand = self._demands.pop(last, None) or _Demand()
        demand.prefill_s.add(min([holder.prefill_s for holder in holders]), now_s)
        demand.num_requests.add(1.0, now_s)
        self._demands[last] = demand
        if len(self._demands) > MAX_CHAINS:
            del self._demands[next(iter(self._demands))]
        if len(self._in_flight) >= self._max_copies or last in self._in_flight or demand.rests_until_s > now_s:
            return None
        if (plan := self._plan(decision, num_blocks, holders, now_s)) is not None:
            self._in_flight[last] = plan.target.worker_id
        return plan

    def explain(self, decision: Decision) -> dict[str, Any] | None:
        """Return the copy of the request's longest match that its demand asks for, in flight or not. Counts nothing."""
        num_blocks, holders = _longest_match(decision)
        plan = self._plan(decision, num_blocks, holders, self._clock()) if num_blocks else None
        if plan is None:
            return None
        return {
            "from": plan.source.worker_id,
            "to": plan.target.worker_id,
            "tokens": plan.num_tokens,
            "demand": plan.demand,
            "wait_s": plan.wait_s,
            "copy_s": plan.copy_s,
            "in_flight": plan.hashes[-1] in self._in_flight,
        }

    def _plan(
        self, decision: Decision, num_blocks: int, holders: Sequence[WorkerView], now_s: float
    ) -> CopyPlan | None:
        last = decision.request.hashes[num_blocks - 1]
        known = self._demands.get(last)
        if known is None or known.num_requests.at(now_s) < MIN_REQUESTS:
            return None
        demand = known.prefill_s.at(now_s) / WINDOW_S / len(holders)
        if demand <= FULL:
            return None
        wait_s = min([holder.wait_s for holder in holders]) + HORIZON_S * (demand - FULL)
        taken = [worker_id for other, worker_id in self._in_flight.items() if other != last]
        num_tokens = num_blocks * holders[0].member.block_size
        targets = [
            each for each in decision.workers if _fetches(each, num_tokens) and each.member.worker_id not in taken
        ]
        target = min(targets, key=lambda each: each.fetch_s + each.eviction_s + each.wait_s, default=None)
        if target is None or target.peers is None or wait_s <= (copy_s := target.fetch_s + target.eviction_s):
            return None
        source = min(target.peers.holders, key=lambda each: each.load.num_running + each.load.num_waiting)
        return CopyPlan(
            decision.request.hashes[:num_blocks],
            decision.request.root,
            source.member,
            target.member,
            num_tokens - target.matched_tokens,
            demand,
            wait_s,
            copy_s,
        )

    def ended(self, plan: CopyPlan) -> None:
        """Record that the blocks have come, or will not."""
        del self._in_flight[plan.hashes[-1]]
        if (demand := self._demands.get(plan.hashes[-1])) is not None:
            demand.rests_until_s = self._clock() + REST_S


class Copies(PlacementListener):
    """Makes the planned copies. Owned by the gateway's event loop."""

    def __init__(self, planner: CopyPlanner, send: SendCopy, metrics: GatewayMetrics) -> None:
        self.planner = planner
        self._send = send
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()

    def placed(self, placement: Placement, decision: Decision) -> None:
        if (plan := self.planner.placed(decision)) is not None:
            task = asyncio.create_task(self._copy(plan))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(self, plan: CopyPlan) -> None:
        """Make a copy. One that fails changes nothing."""
        num_blocks = 0
        try:
            num_blocks = await self._send(plan.target.url, plan.source, plan.root, plan.hashes)
        except WorkerLost as error:
            logger.info("no copy to %s: %s", plan.target.worker_id, error)
        finally:
            self.planner.ended(plan)
            self._metrics.copies.inc("made" if num_blocks else "failed")


def _longest_match(decision: Decision) -> tuple[int, Sequence[WorkerView]]:
    """Return the blocks of the longest match, and the workers that have it and take requests; 0 without one."""
    longest = max([worker.matched_tokens for worker in decision.workers], default=0)
    if not longest:
        return 0, ()
    holders = [each for each in decision.workers if each.matched_tokens == longest and each.guard is None]
    return (longest // holders[0].member.block_size if holders else 0), holders


def _fetches(worker: WorkerView, num_tokens: int) -> bool:
    """Return whether the worker would fetch the prompt's beginning from a peer."""
    plan = worker.plan
    return worker.guard is None and plan is not None and plan.peer_tokens > 0 and plan.end_tokens >= num_tokens
