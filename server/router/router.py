"""HeadstartRouter: the index, the fleet and one dispatcher, behind `placement.Router`.

    router = HeadstartRouter(index, fleet, RouterSettings(gateway_id=...))
    placement = await router.place(RouteRequest(...))        raises NoWorkerError
    router.explain(...)                                      the same decision, not made
    router.report_failure(worker_id)                         the HTTP side could not reach the worker
    router.index_state()                                     is the index blind, and why

The lookup is awaited; everything after it happens in one turn of the event loop, so that decisions see each other.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cache.records import Candidate, PrefixIndex, WorkerMember
from cache.types import GatewayId, WorkerId
from server.router.hits import HitRates
from server.router.index_accuracy import Foresight
from server.router.placement import NoWorkerError, RouteRequest
from server.router.policies import make_policy
from server.router.recent import RecentPlacements
from server.router.scoring import Assignment, Choice, Dispatcher, DispatchSettings
from server.router.watcher import Decision, DecisionWatcher
from server.workers.fleet import Fleet

_BREAKER = "breaker open"


@dataclass(frozen=True, slots=True)
class RouterSettings:
    gateway_id: GatewayId
    policy: str = "headstart"
    dispatch: DispatchSettings = field(default_factory=DispatchSettings)
    max_recent_blocks: int = 1 << 20
    retry_after_s: float = 1.0


@dataclass(frozen=True, slots=True)
class IndexState:
    blind: bool
    reason: str
    kept: float
    """Of the tokens promised lately, the part that was cached."""
    told: float
    """Of the tokens found cached lately, the part that was promised."""


class HeadstartPlacement:
    """See `placement.Placement`."""

    __slots__ = ("_assignment", "_request", "_router", "_saw_token")

    def __init__(self, router: HeadstartRouter, request: RouteRequest, assignment: Assignment) -> None:
        self._router = router
        self._request = request
        self._saw_token = False
        self._assignment = assignment

    @property
    def worker(self) -> WorkerMember:
        return self._assignment.option.member

    @property
    def promised_tokens(self) -> int:
        return self._assignment.option.matched_tokens

    def prefill_started(self, num_cached_tokens: int) -> None:
        if self._assignment.num_cached_tokens is None:
            self._assignment.prefill_started(num_cached_tokens, self._router.clock())
            self._router.found(self._request, self.worker, self.promised_tokens, num_cached_tokens)

    def first_token(self) -> None:
        if not self._saw_token:
            self._saw_token = True
            self._assignment.first_token(self._router.clock())
            self._router.computed(self._request, self.worker)

    def close(self, *, ok: bool) -> None:
        self._assignment.close(self._router.clock())


class HeadstartRouter:
    """See `placement.Router`. Owned by the gateway's event loop."""

    def __init__(
        self,
        index: PrefixIndex,
        fleet: Fleet,
        settings: RouterSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        observe: Callable[[str, float], None] = lambda stage, elapsed_s: None,
        on_match: Callable[[RouteRequest, WorkerMember, int], None] = lambda request, member, num_cached_tokens: None,
    ) -> None:
        """`observe` hears how long each stage of a decision took: lookup and choose.

        `on_match` receives each request with its worker and the number of tokens found cached there.
        """
        self._index = index
        self._fleet = fleet
        self._settings = settings
        self.clock = clock
        self.foresight = Foresight()
        self.hits = HitRates()
        self.watcher: DecisionWatcher | None = None
        """Set while somebody looks: told of decisions as they are made."""
        self._dispatcher = Dispatcher(
            settings.gateway_id, make_policy(settings.policy), settings.dispatch, rng or random.Random()
        )
        fleet.on_forgotten = self._dispatcher.forget
        self._recent = RecentPlacements(settings.max_recent_blocks)
        self._failed_s = self._answered_s = -math.inf
        """When the index last gave no answer, and when one."""
        self._observe = observe
        self._on_match = on_match

    async def place(self, request: RouteRequest) -> HeadstartPlacement:
        """Choose and book. Raises NoWorkerError. Never fails because of Redis."""
        begun_s = self.clock()
        found = await self._index.lookup(request.hashes, request.model)
        found_s = self.clock()
        self._observe("lookup", found_s - begun_s)
        candidates = self._candidates(request, found)
        guards = self._guards(request, candidates)
        now_s = self.clock()
        trace: list[Choice] | None = [] if self.watcher is not None and self.watcher.wants(now_s) else None
        assignment = self._dispatcher.dispatch(request, candidates, guards, now_s, trace=trace)
        if assignment is None and _BREAKER in guards:
            # Better a worker that failed a moment ago than none.
            guards = [None if guard == _BREAKER else guard for guard in guards]
            trace = None if trace is None else []
            assignment = self._dispatcher.dispatch(request, candidates, guards, now_s, trace=trace)
        if assignment is None:
            raise self._no_worker(request, candidates, guards)
        self._observe("choose", self.clock() - found_s)
        if trace is not None and self.watcher is not None:
            self.watcher.decided(Decision(request, assignment.option, trace, index_answered=found is not None))
        return HeadstartPlacement(self, request, assignment)

    async def explain(self, request: RouteRequest) -> dict[str, Any]:
        """Per worker what was matched, waited for and paid, the guard, and who would be chosen. Books nothing."""
        found = await self._index.lookup(request.hashes, request.model)
        candidates = self._candidates(request, found)
        trace: list[Choice] = []
        guards = self._guards(request, candidates)
        self._dispatcher.dispatch(request, candidates, guards, self.clock(), trace=trace, book=False)
        scores = [choice.score for choice in trace if choice.score is not None]
        best = min(scores, default=None)
        return {
            "policy": self._settings.policy,
            "index": "answered" if found is not None else "no answer: own recent placements used",
            "prompt_tokens": request.num_prompt_tokens,
            "prompt_blocks": len(request.hashes),
            "choice": [choice.option.member.worker_id for choice in trace if best is not None and choice.score == best],
            "workers": [_explained(choice) for choice in trace],
        }

    def workers(self, model: str | None = None) -> list[WorkerMember]:
        return self._fleet.workers(model)

    def report_failure(self, worker_id: WorkerId) -> None:
        """The HTTP side could not reach the worker, or lost it in mid-stream."""
        self._fleet.report_failure(worker_id)

    def report_wrong_epoch(self, member: WorkerMember) -> None:
        """The worker has refused a request for another epoch than the one it was placed with."""
        self._fleet.report_wrong_epoch(member)

    def computed(self, request: RouteRequest, member: WorkerMember) -> None:
        """For placements: the worker has the prompt's blocks in its cache, and is well."""
        self._fleet.report_success(member.worker_id)
        self._recent.add(member.worker_id, member.epoch, request.hashes)

    def num_booked(self) -> int:
        """Requests that were placed and have not ended."""
        return self._dispatcher.num_outstanding

    def found(self, request: RouteRequest, member: WorkerMember, promised_tokens: int, num_cached_tokens: int) -> None:
        """For placements: the worker has said how much of the prompt it holds."""
        self.foresight.add(promised_tokens, num_cached_tokens)
        self.hits.add(member.worker_id, request.num_prompt_tokens, num_cached_tokens, self.clock())
        self._on_match(request, member, num_cached_tokens)
        if self.watcher is not None:
            self.watcher.started(request.request_id, num_cached_tokens)

    def index_state(self) -> IndexState:
        """For readiness and metrics."""
        foresight = self.foresight
        failed = self._failed_s > max(self._answered_s, self._fleet.index_answered_s)
        reason = "the last lookup got no answer" if failed else foresight.reason
        return IndexState(failed or foresight.blind, reason, foresight.kept, foresight.told)

    def _candidates(self, request: RouteRequest, found: Sequence[Candidate] | None) -> list[Candidate]:
        if found is None:
            self._failed_s = self.clock()
        else:
            self._answered_s = self.clock()
        candidates = self._fleet.candidates(request.model, found)
        if found is None:
            recent = self._recent.matched(request.hashes)
            candidates = [
                Candidate(c.member, c.load, recent.get((c.member.worker_id, c.member.epoch), 0), c.load_age_s)
                for c in candidates
            ]
        return candidates

    def _guards(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[str | None]:
        return [self._guard(request, candidate) for candidate in candidates]

    def _guard(self, request: RouteRequest, candidate: Candidate) -> str | None:
        member = candidate.member
        if (member.worker_id, member.epoch) in request.excluded:
            return "has failed this request"
        if request.numerics is not None and member.numerics != request.numerics:
            return "another numerics class"
        if request.num_prompt_tokens > member.max_model_len:
            return "context too short"
        if candidate.load.draining:
            return "draining"
        if self._fleet.broken(member.worker_id):
            return _BREAKER
        return None

    def _no_worker(
        self, request: RouteRequest, candidates: Sequence[Candidate], guards: Sequence[str | None]
    ) -> NoWorkerError:
        if not candidates:
            message = f"no worker of model {request.model!r} is known"
            return NoWorkerError(message, contended=False, retry_after_s=self._settings.retry_after_s)
        reasons = sorted({guard or "queue full" for guard in guards})
        message = f"none of {len(candidates)} workers can take the request: {', '.join(reasons)}"
        contended = any(guard is None for guard in guards)  # a guard of the dispatcher: its queue is full
        return NoWorkerError(message, contended=contended, retry_after_s=self._settings.retry_after_s)


def _explained(choice: Choice) -> dict[str, Any]:
    option = choice.option
    return {
        "worker": option.member.worker_id,
        "epoch": option.member.epoch,
        "matched_tokens": option.matched_tokens,
        "index_tokens": choice.index_tokens,
        "overlay_tokens": choice.overlay_tokens,
        "wait_s": option.wait_s,
        "room_wait_s": option.room_s,
        "delayed": option.num_delayed,
        "prefill_s": option.own_s,
        "recent_s": option.recent_s,
        "outstanding": option.num_outstanding,
        "waiting": option.num_waiting,
        "guard": choice.guard,
        "cost": choice.score,
    }
