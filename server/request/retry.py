"""When a failed attempt is repeated, and what the client is told when it is not.

A worker's death says little about its requests, except for those that it had accepted and given no token since: these
are poison candidates. The next worker prefills candidates one at a time, and announces each, so that a second death
has one culprit at most. A token clears a request.

Source: docs/reliability.md, "How it works".
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Mapping
from enum import Enum, auto
from hashlib import blake2b
from typing import Final

import msgspec

from cache.records import WorkerMember
from cache.types import WorkerIncarnation
from server.errors import (
    ApiError,
    BodyTooLargeError,
    ContextLengthError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    WorkerLostError,
)
from server.metrics import GatewayMetrics
from server.rates import TokenBucket
from server.request.choice import GenerationSpec, ParamNames
from server.request.limits import BackpressureCache
from server.router.placement import NoWorkerError
from server.router.router import Router
from server.workers.client import StaleConnection, WorkerLost, WorkerRefused
from worker.wire import Failed

log = logging.getLogger(__name__)

MAX_SUSPICIONS: Final = 2
"""Workers that may die with a request in its prefill before it counts as poison."""
MAX_LOSSES: Final = 5
MAX_REFUSALS: Final = 8
MAX_READMISSIONS: Final = 2
MAX_WAITS: Final = 4
MAX_BALANCE: Final = 100.0
RETRIES_PER_REQUEST: Final = 0.1
RETRIES_PER_S: Final = 2.0
POISON_TTL_S: Final = 60.0
"""Long enough to end a client's retries; short, because a worker may have failed for a reason of its own."""
MAX_POISON_ENTRIES: Final = 10_000


class WorkerFailed(Exception):
    """The worker ended the stream with a Failed frame."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(f"{failed.code}: {failed.message}")
        self.failed = failed


class Stage(Enum):
    """How far an attempt has come."""

    SENT = auto()
    ACCEPTED = auto()
    PREFILLING = auto()
    """The worker has said that the prefill begins."""
    ANSWERED = auto()
    """A token has come."""


class AttemptHistory:
    """The failed attempts of one generation."""

    __slots__ = (
        "excluded",
        "num_losses",
        "num_readmissions",
        "num_refusals",
        "num_suspicions",
        "num_waits",
        "soonest_refusal",
    )

    def __init__(self) -> None:
        self.excluded: set[WorkerIncarnation] = set()
        """Workers that shall not get the request again, unless they have restarted."""
        self.num_losses = 0
        self.num_suspicions = 0
        self.num_refusals = 0
        self.num_readmissions = 0
        self.num_waits = 0
        self.soonest_refusal: WorkerRefused | None = None
        """The refusal that may be tried again first."""

    @property
    def is_poison_candidate(self) -> bool:
        return self.num_suspicions > 0

    def answered(self) -> None:
        """A token has come: the request is no poison candidate."""
        self.num_suspicions = 0

    def exclude(self, worker: WorkerMember) -> None:
        self.excluded.add((worker.worker_id, worker.epoch))

    def lost(self, worker: WorkerMember, stage: Stage) -> ApiError | None:
        """Record a lost worker. Return why the request is not tried again, or None."""
        self.exclude(worker)
        self.num_losses += 1
        if stage is Stage.PREFILLING or (stage is Stage.ACCEPTED and not self.num_suspicions):
            self.num_suspicions += 1
        if self.num_suspicions >= MAX_SUSPICIONS:
            return InternalError("The request failed on several workers and is not tried again.")
        if self.num_losses >= MAX_LOSSES:
            return WorkerLostError("The request has lost too many workers.", retry_after_s=1.0)
        return None

    def refused(self, worker: WorkerMember, refusal: WorkerRefused) -> bool:
        """Record a refusal. Return whether another attempt may follow."""
        self.num_refusals += 1
        if self.soonest_refusal is None or retry_after_s(refusal) < retry_after_s(self.soonest_refusal):
            self.soonest_refusal = refusal
        if refusal.status != 409 or self.num_refusals > 1:
            self.exclude(worker)
        return self.num_refusals <= MAX_REFUSALS

    def excuse_stale(self) -> bool:
        """Whether a kept-alive connection that ended before an answer is no loss: only as the first trouble."""
        if self.num_refusals:
            return False
        self.num_refusals += 1
        return True

    def readmit_lost(self) -> bool:
        """Let the lost workers have the request again, should they live. Return whether that is allowed."""
        if not self.num_losses or self.num_suspicions or self.num_readmissions >= MAX_READMISSIONS:
            return False
        self.num_readmissions += 1
        self.excluded.clear()
        return True

    def may_wait(self) -> bool:
        """Whether to wait for a worker that may start in the place of one that stops."""
        self.num_waits += 1
        return not self.num_losses and self.num_waits <= MAX_WAITS


class RetryBudget:
    """A process's allowance of retries: a tenth of the requests, and two a second, at most 100 saved up.

    Source: the retry budgets of Finagle and Linkerd.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bucket = TokenBucket(RETRIES_PER_S, MAX_BALANCE)

    def earn(self) -> None:
        """Count a new request."""
        self._bucket.add(self._clock(), RETRIES_PER_REQUEST)

    def spend(self) -> bool:
        """Take one retry, if one is left."""
        return self._bucket.take(self._clock()) == 0.0


class PoisonCache:
    """Requests that broke a worker, by a hash of all that decides what is computed. Each gateway learns by itself."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until_s: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, spec: GenerationSpec) -> None:
        while len(self._until_s) >= MAX_POISON_ENTRIES:
            del self._until_s[next(iter(self._until_s))]
        self._until_s[_poison_key(spec)] = self._clock() + POISON_TTL_S

    def __contains__(self, spec: GenerationSpec) -> bool:
        if not self._until_s:
            return False
        key = _poison_key(spec)
        until_s = self._until_s.get(key)
        if until_s is not None and until_s <= self._clock():
            del self._until_s[key]
            return False
        return until_s is not None


def _poison_key(spec: GenerationSpec) -> bytes:
    digest = blake2b(spec.root, digest_size=16)
    digest.update(array("I", spec.prompt_ids).tobytes())
    digest.update(msgspec.msgpack.encode(spec.sampling))
    return digest.digest()


class RetryPolicy:
    """Judges failed attempts, for every generation of this process.

    The methods that take a failure raise ApiError when the request shall not be tried again.
    """

    def __init__(self, router: Router, metrics: GatewayMetrics, budget: RetryBudget | None = None) -> None:
        self._router = router
        self._metrics = metrics
        self._budget = budget or RetryBudget()
        self._poison = PoisonCache()
        self.backpressure = BackpressureCache()

    def admit(self, spec: GenerationSpec) -> None:
        """Count a new request. Raises InternalError for one that is known as poison."""
        self._budget.earn()
        if spec in self._poison:
            raise InternalError("This request has failed a moment ago and is not tried again.")

    def refused(
        self, spec: GenerationSpec, history: AttemptHistory, worker: WorkerMember, refusal: WorkerRefused
    ) -> None:
        """The worker has begun nothing."""
        self._metrics.refused(refusal.status)
        if refusal.failed.code == "queue_full":
            self.backpressure.add((worker.worker_id, worker.epoch), spec.tenant, refusal)
        if refusal.failed.code == "wrong_epoch":
            self._router.report_wrong_epoch(worker)
        may_retry = refusal.status in (401, 409, 429, 502, 503, 504)
        if not (may_retry and history.refused(worker, refusal) and self._budget.spend()):
            raise error_of(refusal.failed, spec.params, refusal.status) from refusal
        log.info("%s: worker %s refused: %s", spec.request_id, worker.worker_id, refusal)

    def failed(
        self, spec: GenerationSpec, history: AttemptHistory, worker: WorkerMember, error: WorkerFailed, stage: Stage
    ) -> None:
        """The worker has given the request up."""
        if not error.failed.retryable:
            raise self._judged(spec, error_of(error.failed, spec.params)) from error
        if error.failed.code == "draining":
            log.info("%s: worker %s hands it over", spec.request_id, worker.worker_id)
            history.exclude(worker)
            return
        self.lost(spec, history, worker, error, stage)

    def lost(
        self, spec: GenerationSpec, history: AttemptHistory, worker: WorkerMember, error: Exception, stage: Stage
    ) -> None:
        """The worker is gone, or gave up, with the attempt at `stage`."""
        if isinstance(error, StaleConnection) and history.excuse_stale():
            log.info("%s: worker %s is asked again: %s", spec.request_id, worker.worker_id, error)
            return
        self._metrics.lost.inc()
        log.warning("%s: worker %s lost: %s", spec.request_id, worker.worker_id, error)
        if isinstance(error, WorkerLost):
            self._router.report_failure(worker.worker_id)
        if (failure := history.lost(worker, stage)) is not None:
            raise self._judged(spec, failure) from error

    def no_worker(self, spec: GenerationSpec, history: AttemptHistory, error: NoWorkerError) -> ApiError:
        """Return why there is none: workers that refused or died say more than the router, which left them out."""
        if history.num_losses:
            return WorkerLostError("The worker was lost before it could answer.", retry_after_s=error.retry_after_s)
        if (refusal := history.soonest_refusal) is not None:
            return error_of(refusal.failed, spec.params, refusal.status)
        if error.contended:
            return OverloadedError(str(error), code="queue_full", retry_after_s=error.retry_after_s)
        return UnavailableError(str(error), retry_after_s=error.retry_after_s)

    def _judged(self, spec: GenerationSpec, failure: ApiError) -> ApiError:
        """Return the failure; remember the request as poison when the failure is its own."""
        if isinstance(failure, InternalError):
            log.error("%s: the request is refused from now on: it has failed on its own", spec.request_id)
            self._poison.add(spec)
            self._metrics.quarantined.inc()
        return failure


def retry_after_s(refusal: WorkerRefused) -> float:
    """Return when the worker may be asked again."""
    asked_s = refusal.failed.retry_after_s
    return 1.0 if asked_s is None else asked_s


def backpressure_error(refusals: Mapping[WorkerIncarnation, WorkerRefused], params: ParamNames) -> ApiError:
    """Repeat the refusal of the worker that will have room first."""
    soonest = min(refusals.values(), key=retry_after_s)
    return error_of(soonest.failed, params, soonest.status)


def error_of(failed: Failed, params: ParamNames, status: int | None = None) -> ApiError:
    """Return what a worker's Failed frame means to the client."""
    match failed.code:
        case "context_length_exceeded":
            return ContextLengthError(failed.message, param=params.prompt)
        case "invalid_grammar":
            return InvalidRequestError(failed.message, param=params.grammar)
        case "queue_full" | "queue_timeout" | "no_room" | "overloaded":
            asked_s = 1.0 if failed.retry_after_s is None else failed.retry_after_s
            return OverloadedError(failed.message, code="queue_full", retry_after_s=asked_s)
        case "draining" | "wrong_epoch" | "not_ready":
            return UnavailableError("The worker is not ready; try again.", retry_after_s=1.0)
        case "payload_too_large":
            return BodyTooLargeError("The request is too large for a worker.")
        case "deadline" | "timeout":
            return DeadlineError(failed.message)
    if status == 400 or failed.code.startswith("invalid"):
        return InvalidRequestError(failed.message)
    if status == 429:
        return OverloadedError(failed.message, code="queue_full", retry_after_s=1.0)
    if status in (502, 503, 504) or failed.retryable:
        return UnavailableError("The worker could not take the request; try again.", retry_after_s=1.0)
    log.error("a worker failed a request: %s: %s", failed.code, failed.message)
    return InternalError("The worker met an internal error.")
