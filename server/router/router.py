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
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec

from cache.records import Candidate, PrefixIndex, WorkerMember
from cache.types import BlockHash, GatewayId
from server.metrics import GatewayMetrics
from server.router.copies import CopyPlan, CopyPlanner
from server.router.cost import WorkerView
from server.router.decisions import DecisionLog
from server.router.held_requests import RETRY_S, HeldRequest, HeldRequests
from server.router.index_accuracy import IndexAccuracy
from server.router.placement import OTHER_TASK, SLOW, TOO_SHORT, UNSUPPORTED, Decision, Placement, Scorer, guard_of
from server.router.policies import make_policy
from server.router.types import NoWorkerError, RouteRequest, TtftBudgetError
from server.router.workers_needed import INTERVAL_S, WorkersNeeded
from server.workers.connection import WorkerLost
from server.workers.fleet import Fleet

logger = logging.getLogger(__name__)

RETRY_AFTER_S: Final = 1.0


SendCopy = Callable[[str, WorkerMember, BlockHash, Sequence[BlockHash]], Awaitable[int]]
"""`WorkerClient.adopt`."""


class _Waiting(msgspec.Struct, eq=False):
    """A held request, and its future placement."""

    request: RouteRequest
    prefill_s: float
    """Its prefill at the worker of the last decision."""
    placed: asyncio.Future[Placement]


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
        hold_s: float = 0.0,
        scale_objective_s: float = 3.0,
        send_copy: SendCopy | None = None,
        max_copies: int = 0,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        """Raises ValueError for an unknown policy.

        `hold_s`: requests that would wait longer at their worker wait here (see `HeldRequests`); 0.0: none does.
        `scale_objective_s`: see `WorkersNeeded`.
        `send_copy` makes copies of hot chains, of which `max_copies` are in flight.
        """
        self._index = index
        self.fleet = fleet
        self.policy = policy
        self._metrics = metrics
        self._clock = clock
        self.decisions = DecisionLog()
        self.scorer = Scorer(gateway_id, make_policy(policy), clock, rng or random.Random())
        self.copies = CopyPlanner(clock, max_copies if send_copy is not None else 0)
        self._send_copy = send_copy
        self._copying: set[asyncio.Task[None]] = set()
        self.held = HeldRequests[_Waiting](hold_s)
        self._releasing: asyncio.Task[None] | None = None
        """Runs while requests are held."""
        self.workers_needed = WorkersNeeded(scale_objective_s, clock)
        self._accuracy = IndexAccuracy()
        self._failed_s = self._answered_s = -math.inf
        """When a lookup last failed, and when one succeeded."""

    async def place(self, request: RouteRequest) -> Placement:
        """Choose a worker and count the request there. Raises NoWorkerError. Never fails because of Redis."""
        found, decision = await self._decide(request)
        if request.may_be_held and (wait_s := decision.wait_s) > 0.0:
            waiting = _Waiting(request, decision.best[0].prefill_s, asyncio.get_running_loop().create_future())
            if (held := self.held.add(waiting, request, wait_s, self._clock())) is not None:
                return await self._wait(held)
        return self._place(decision, found)

    async def _decide(self, request: RouteRequest) -> tuple[Sequence[Candidate] | None, Decision]:
        """Return the candidates from the index, None without an answer, and the decision made with them."""
        begun_s = self._clock()
        found = await self._index.lookup(request.hashes, request.model, request.num_prompt_tokens)
        found_s = self._clock()
        self._metrics.route_s.observe(found_s - begun_s, "lookup")
        decision = self.scorer.decide(request, self._candidates(request, found), self.fleet.broken())
        self._metrics.route_s.observe(self._clock() - found_s, "choose")
        return found, decision

    def _place(self, decision: Decision, found: Sequence[Candidate] | None) -> Placement:
        """Raises NoWorkerError."""
        if not decision.best:
            raise _no_worker(decision, self.fleet)
        placement = self.scorer.place(decision)
        self.decisions.decided(decision, placement, self._clock(), index_answered=found is not None)
        if (plan := self.copies.placed(decision)) is not None:
            self.copies.begun(plan)
            task = asyncio.create_task(self._copy(plan))
            self._copying.add(task)
            task.add_done_callback(self._copying.discard)
        return placement

    async def _copy(self, plan: CopyPlan) -> None:
        """Make a copy. One that fails changes nothing."""
        assert self._send_copy is not None, "copies are planned without a sender"
        num_blocks = 0
        try:
            num_blocks = await self._send_copy(plan.target.url, plan.source, plan.root, plan.hashes)
        except WorkerLost as error:
            logger.info("no copy to %s: %s", plan.target.worker_id, error)
        finally:
            self.copies.ended(plan)
            self._metrics.copies.inc("made" if num_blocks else "failed")

    async def _wait(self, held: HeldRequest[_Waiting]) -> Placement:
        """Wait for a held request's placement. Raises NoWorkerError."""
        placed = held.item.placed
        if self._releasing is None or self._releasing.done():
            self._releasing = asyncio.create_task(self._release())
        try:
            return await placed
        except asyncio.CancelledError:
            if placed.done() and not placed.cancelled() and placed.exception() is None:
                self.closed(placed.result())
            raise
        finally:
            self.held.remove(held)

    async def _release(self) -> None:
        """Place held requests as workers become free, until none is left."""
        while self.held:
            for held in self.held.due(self._clock()):
                request, placed = held.item.request, held.item.placed
                found, decision = await self._decide(request)
                if placed.done() or self.held.stays(held, decision.wait_s, self._clock()):
                    continue
                try:
                    placed.set_result(self._place(decision, found))
                except NoWorkerError as error:
                    placed.set_exception(error)
            await asyncio.sleep(RETRY_S)

    async def explain(self, request: RouteRequest) -> dict[str, Any]:
        """Return how `place` would score each worker, and which it would choose. Places nothing."""
        found = await self._index.lookup(request.hashes, request.model, request.num_prompt_tokens)
        decision = self.scorer.decide(request, self._candidates(request, found), self.fleet.broken(), dry_run=True)
        plan = self.copies.plan(decision)
        return {
            "policy": self.policy,
            "index": "answered" if found is not None else "no answer: own recent placements used",
            "prompt_tokens": request.num_prompt_tokens,
            "prompt_blocks": len(request.hashes),
            "choice": [worker.member.worker_id for worker in decision.best],
            "copy": None if plan is None else plan.describe() | {"in_flight": self.copies.is_in_flight(plan)},
            "workers": [self._explained(worker) for worker in decision.workers],
        }

    def held_prefills_s(self, model: str) -> list[float]:
        """Return the prefill seconds of each held request."""
        return [held.item.prefill_s for held in self.held if held.item.request.model == model]

    async def observe_load(self) -> None:
        """Keep `workers_needed` up to date, until cancelled."""
        while True:
            self.observe_workers()
            await asyncio.sleep(INTERVAL_S)

    def observe_workers(self) -> None:
        """Apply the reports of all workers to `workers_needed`."""
        models = {worker.model for worker in self.fleet.workers()}
        workers = {model: self.fleet.candidates(model, None) for model in models}
        self.workers_needed.observe(workers, lambda model: sum(self.held_prefills_s(model)))

    def started(self, placement: Placement, num_cached_tokens: int, queue_s: float | None = None) -> None:
        """Record that the prefill begins: the worker took the request from its queue and looked up its blocks."""
        if self.scorer.started(placement, num_cached_tokens):
            self._accuracy.add(placement.promised_tokens, num_cached_tokens)
            self.scorer.ledger.found(placement.request, placement.worker, num_cached_tokens)
            self.decisions.started(placement.request.request_id, num_cached_tokens, queue_s)

    def corrected(self, placement: Placement, num_cached_tokens: int) -> None:
        """Record the engine's own count of the cached tokens, which its worker could only guess."""
        if self.scorer.corrected(placement, num_cached_tokens):
            self._accuracy.add(placement.promised_tokens, num_cached_tokens)

    def first_token(self, placement: Placement) -> None:
        """Mark the worker healthy and record that it holds the prompt's blocks."""
        if not self.scorer.first_token(placement):
            return
        self.decisions.reached(placement.request.request_id, "first_token")
        member = placement.worker
        self.fleet.report_success(member.worker_id)
        actual_s = self._clock() - placement.placed_s
        if actual_s > 0.0:
            self._metrics.predicted_over_actual_ttft.observe(placement.predicted_ttft_s / actual_s)

    def closed(self, placement: Placement) -> None:
        """Record the end of the request."""
        self.scorer.closed(placement)
        self.decisions.reached(placement.request.request_id, "end")

    def index_state(self) -> dict[str, Any]:
        """Return the index's health as JSON: blind if it is wrong or does not answer. Ratios are None until judged."""
        accuracy = self._accuracy
        failed = self._failed_s > max(self._answered_s, self.fleet.index_answered_s)
        return {
            "blind": failed or accuracy.blind,
            "reason": "the last lookup got no answer" if failed else accuracy.reason,
            "precision": accuracy.precision,
            "recall": accuracy.recall,
            "num_requests": len(accuracy.recent),
        }

    def _explained(self, worker: WorkerView) -> dict[str, Any]:
        plan, peers = worker.plan, worker.peers
        peer = None if peers is None else self.scorer.choose_peer(peers.holders, dry_run=True).worker_id
        return {
            "worker": worker.member.worker_id,
            "epoch": worker.member.epoch,
            "matched_tokens": worker.matched_tokens,
            "index_tokens": worker.index_tokens,
            "pending_tokens": worker.pending_tokens,
            "ends": worker.member.ends,
            "index_problem": worker.member.index_problem,
            "wait_s": worker.queue_s,
            "kv_wait_s": worker.kv_wait_s,
            "eviction_s": worker.eviction_s,
            "decode_s": worker.decode_s,
            "num_displaced": worker.num_displaced,
            "loaded_tokens": {} if plan is None else dict(zip(worker.member.tiers, plan.tier_tokens, strict=False)),
            "fetched_tokens": 0 if plan is None else plan.peer_tokens,
            "fetch_from": peer,
            "fetch_s": worker.fetch_s,
            "prefill_s": worker.prefill_s,
            "predicted_ttft_s": worker.predicted_ttft_s,
            "assigned_s": worker.assigned_s,
            "outstanding": worker.num_outstanding,
            "waiting": worker.num_waiting,
            "guard": worker.guard,
            "cost": worker.score,
        }

    def _candidates(self, request: RouteRequest, found: Sequence[Candidate] | None) -> list[Candidate]:
        """Return the workers of the model. Without an answer of the index, match own recent placements.

        They do not count at a worker with ends.
        """
        candidates = self.fleet.candidates(request.model, found, request.revision)
        if found is not None:
            self._answered_s = self._clock()
            return candidates
        self._failed_s = self._clock()
        recent = self.scorer.ledger.recent(request.hashes)
        matches = [0 if c.member.ends else recent.get((c.member.worker_id, c.member.epoch), 0) for c in candidates]
        return [Candidate(c.member, c.load, num, c.load_age_s) for c, num in zip(candidates, matches, strict=True)]


def _no_worker(decision: Decision, fleet: Fleet) -> NoWorkerError:
    workers, model, budget_s = decision.workers, decision.request.model, decision.request.ttft_budget_s
    guards = [guard_of(decision.request, c.member, c.load) for c in fleet.silent(model, decision.request.revision)]
    if not {None, SLOW}.isdisjoint(guards):
        message = f"a worker of model {model!r} does not answer now"
        return NoWorkerError(message, retry_after_s=RETRY_AFTER_S, is_silent=True)
    if budget_s is not None and (predicted_s := [w.predicted_ttft_s for w in workers if w.score is not None]):
        return TtftBudgetError(min(predicted_s), budget_s)
    if not workers:
        message = f"no worker of model {model!r} is {'ready' if fleet.workers(model) else 'known'}"
        return NoWorkerError(message, retry_after_s=RETRY_AFTER_S)
    reasons = sorted({str(worker.guard) for worker in workers if worker.guard != OTHER_TASK} or {OTHER_TASK})
    if reasons == [UNSUPPORTED]:
        lacking = [name for name in decision.request.required if any(name in w.member.unsupported for w in workers)]
        lacking += ["images"] if decision.request.has_images else []
        message = f"{', '.join(lacking)}: no worker of model {model!r} can serve this"
        return NoWorkerError(message, retry_after_s=RETRY_AFTER_S, unsupported=lacking)
    message = f"none of {len(workers)} workers can take the request: {', '.join(reasons)}"
    longest = max(worker.member.max_model_len for worker in workers) if reasons == [TOO_SHORT] else None
    return NoWorkerError(message, retry_after_s=RETRY_AFTER_S, longest_context=longest)
