"""The router: looks up the prompt in the index, asks the fleet for candidates, and places the request.

The lookup is awaited. Everything after it happens in one turn of the event loop, so that decisions see each other.

    place --> decide --> wait at the worker short --> placed
                |
                +------> long --> held --> decide again, the tenants in turn --> placed
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from cache.records import Candidate, PrefixIndex
from cache.types import GatewayId
from server.metrics import GatewayMetrics
from server.router.cost import SLOW, TOO_SHORT, guard_of
from server.router.placement import Decision, Placement, PlacementListener, Scorer
from server.router.policies import make_policy
from server.router.queue import RETRY_S, HeldRequest, RequestQueue
from server.router.types import NoWorkerError, RouteRequest, TtftBudgetError
from server.workers.fleet import Fleet

logger = logging.getLogger(__name__)


# Why every worker prefills and decodes: with fixed roles the first token took 1.5 to 10 times as long, in a
# simulation. A cost without roles never splits a request. Even gaps between tokens come from smaller chunks, at less
# cost.
class Router:
    """Places requests at workers, and follows each placement to its end. Owned by the gateway's event loop."""

    def __init__(
        self,
        index: PrefixIndex,
        fleet: Fleet,
        gateway_id: GatewayId,
        metrics: GatewayMetrics,
        *,
        policy: str = "headstart",
        queue: RequestQueue[asyncio.Future[Placement]] | None = None,
        listeners: Sequence[PlacementListener] = (),
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        """Raises ValueError for an unknown policy.

        `queue`: holds requests whose wait at a worker would be long.
        `listeners`: are called at each event of a placement, in this order.
        """
        self._index = index
        self.fleet = fleet
        self.policy = policy
        self._metrics = metrics
        self._clock = clock
        self.scorer = Scorer(gateway_id, make_policy(policy), clock, rng or random.Random())
        self._listeners = listeners
        self.queue = RequestQueue() if queue is None else queue
        self._releasing: asyncio.Task[None] | None = None
        """Runs while requests are held."""
        self._failed_s = self._answered_s = -math.inf
        """When a lookup last failed, and when one succeeded."""

    async def place(self, request: RouteRequest) -> Placement:
        """Choose a worker, and count the request there. Raises NoWorkerError or TtftBudgetError.

        Never fails because of Redis.
        """
        decision = await self.decide(request)
        if self.queue.holds(request, wait_s := decision.wait_s):
            placed = asyncio.get_running_loop().create_future()
            held = self.queue.hold(placed, request, wait_s, self._clock(), decision.best[0].prefill_s)
            return await self._wait(held)
        return self._place(decision)

    async def decide(self, request: RouteRequest, *, dry_run: bool = False) -> Decision:
        """Decide, and place nothing. `dry_run`: see `Scorer.decide`."""
        begun_s = self._clock()
        found = await self._index.lookup(request.hashes, request.model, request.num_prompt_tokens)
        found_s = self._clock()
        self._metrics.route_s.observe(found_s - begun_s, "lookup")
        candidates = self._candidates(request, found)
        answered, broken = found is not None, self.fleet.broken()
        decision = self.scorer.decide(request, candidates, broken, index_answered=answered, dry_run=dry_run)
        self._metrics.route_s.observe(self._clock() - found_s, "choose")
        return decision

    def _place(self, decision: Decision) -> Placement:
        """Raises NoWorkerError or TtftBudgetError."""
        if not decision.best:
            raise _no_worker(decision, self.fleet)
        placement = self.scorer.place(decision)
        for listener in self._listeners:
            listener.placed(placement, decision)
        return placement

    async def _wait(self, held: HeldRequest[asyncio.Future[Placement]]) -> Placement:
        """Wait for a held request's placement. Raises NoWorkerError."""
        placed = held.item
        if self._releasing is None or self._releasing.done():
            self._releasing = asyncio.create_task(self._release())
        try:
            return await placed
        except asyncio.CancelledError:
            if placed.done() and not placed.cancelled() and placed.exception() is None:
                self.closed(placed.result())
            raise
        finally:
            self.queue.remove(held)

    async def _release(self) -> None:
        """Place held requests as workers become free, until none is left."""
        while self.queue:
            for held in self.queue.due(self._clock()):
                placed = held.item
                try:
                    request, full = held.request, self.queue.full(held.request.tenant)
                    excluded = request.excluded - request.full.difference(full)
                    decision = await self.decide(replace(request, excluded=excluded))
                    if not placed.done() and not self.queue.stays(held, decision.wait_s, self._clock()):
                        placed.set_result(self._place(decision))
                except Exception as error:  # one request must not end the others' wait
                    if not placed.done():
                        placed.set_exception(error)
            await asyncio.sleep(RETRY_S)

    def started(self, placement: Placement, num_cached_tokens: int, queue_s: float | None = None) -> None:
        """Record that the prefill begins: the worker took the request from its queue and looked up its blocks."""
        if self.scorer.started(placement, num_cached_tokens, queue_s):
            for listener in self._listeners:
                listener.started(placement)

    def corrected(self, placement: Placement, num_cached_tokens: int) -> None:
        """Record the engine's own count of the cached tokens, which its worker could only guess."""
        if self.scorer.corrected(placement, num_cached_tokens):
            for listener in self._listeners:
                listener.corrected(placement)

    def first_token(self, placement: Placement) -> None:
        """Mark the worker healthy and record that it holds the prompt's blocks."""
        if not self.scorer.first_token(placement):
            return
        self.fleet.report_success(placement.worker.worker_id)
        if placement.request.is_whole:
            return
        actual_s = self._clock() - placement.placed_s
        if actual_s > 0.0:
            self._metrics.predicted_over_actual_ttft.observe(placement.predicted_ttft_s / actual_s)
        for listener in self._listeners:
            listener.first_token(placement)

    def closed(self, placement: Placement) -> None:
        """Record the end of the request."""
        if self.scorer.closed(placement):
            for listener in self._listeners:
                listener.closed(placement)

    @property
    def lookup_failed(self) -> bool:
        """True if the last lookup got no answer."""
        return self._failed_s > max(self._answered_s, self.fleet.index_answered_s)

    def _candidates(self, request: RouteRequest, found: Sequence[Candidate] | None) -> list[Candidate]:
        """Return the workers of the model. Without an answer of the index, match own recent placements.

        Workers whose hits may stop early (`ends`) then match no block.
        """
        candidates = self.fleet.candidates(request.model, found, request.namespace)
        if found is not None:
            self._answered_s = self._clock()
            return candidates
        self._failed_s = self._clock()
        recent = self.scorer.ledger.recent(request.hashes)
        matches = [0 if c.member.ends else recent.get((c.member.worker_id, c.member.epoch), 0) for c in candidates]
        return [Candidate(c.member, c.load, num, c.load_age_s) for c, num in zip(candidates, matches, strict=True)]


def _no_worker(decision: Decision, fleet: Fleet) -> NoWorkerError | TtftBudgetError:
    workers, model, budget_s = decision.workers, decision.request.model, decision.request.ttft_budget_s
    guards = [guard_of(decision.request, c.member, c.load) for c in fleet.silent(model, decision.request.namespace)]
    if not {None, SLOW}.isdisjoint(guards):
        return NoWorkerError(f"a worker of model {model!r} does not answer now", is_silent=True)
    if budget_s is not None and (predicted_s := [w.predicted_ttft_s for w in workers if w.score is not None]):
        return TtftBudgetError(min(predicted_s), budget_s)
    if not workers:
        return NoWorkerError(f"no worker of model {model!r} is {'ready' if fleet.workers(model) else 'known'}")
    able = [worker for worker in workers if decision.request.needs.issubset(worker.member.capabilities)] or workers
    reasons = sorted({str(worker.guard) for worker in able})
    message = f"none of {len(workers)} workers can take the request: {', '.join(reasons)}"
    if reasons != [TOO_SHORT]:
        return NoWorkerError(message)
    request = decision.request
    longest = fleet.longest_context(model, request.namespace, request.needs)
    is_too_long = max(request.num_prompt_tokens, request.num_context_tokens) > longest
    return NoWorkerError(message, longest_context=longest if is_too_long else None)
