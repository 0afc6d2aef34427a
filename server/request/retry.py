"""Decide whether a failed attempt is repeated, and name the error that the client gets when it is not.

A worker's death says little about its requests, except for those that it had accepted and given no token since: these
are poison candidates. The next worker prefills candidates one at a time, and announces each, so that a second death
has one culprit at most. A token clears a request.

Source: docs/reliability.md, "How it works".
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

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
from server.request.choice import GenerationSpec
from server.request.limits import BackpressureCache, PoisonCache, RetryBudget
from server.router.types import NoWorkerError
from server.workers.client import StaleConnection, WorkerLost, WorkerRefused
from server.workers.fleet import Fleet
from worker.wire import Failed

log = logging.getLogger(__name__)

MAX_SUSPICIONS: Final = 2
"""Workers that may die with a request in its prefill before it counts as poison."""
MAX_LOSSES: Final = 5
MAX_REFUSALS: Final = 8
MAX_READMISSIONS: Final = 2
MAX_WAITS: Final = 4


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
    """The attempts of one generation: how far the current one has come, and how the others failed."""

    def __init__(self, spec: GenerationSpec) -> None:
        self.spec = spec
        self.stage = Stage.SENT
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
        """Record the attempt's first token: the request is no poison candidate."""
        self.stage = Stage.ANSWERED
        self.num_suspicions = 0

    def exclude(self, worker: WorkerMember) -> None:
        self.excluded.add((worker.worker_id, worker.epoch))

    def lost(self, worker: WorkerMember) -> ApiError | None:
        """Record a lost worker. Return why the request is not tried again, or None."""
        self.exclude(worker)
        self.num_losses += 1
        if self.stage is Stage.PREFILLING or (self.stage is Stage.ACCEPTED and not self.num_suspicions):
            self.num_suspicions += 1
        if self.num_suspicions >= MAX_SUSPICIONS:
            return InternalError("The request failed on several workers and is not tried again.")
        if self.num_losses >= MAX_LOSSES:
            return WorkerLostError("The request has lost too many workers.", retry_after_s=1.0)
        return None

    def refused(self, worker: WorkerMember, refusal: WorkerRefused) -> bool:
        """Record a refusal. Return whether another attempt may follow."""
        self.num_refusals += 1
        if self.soonest_refusal is None or refusal.retry_after_s < self.soonest_refusal.retry_after_s:
            self.soonest_refusal = refusal
        if refusal.status != 409 or self.num_refusals > 1:
            self.exclude(worker)
        return self.num_refusals <= MAX_REFUSALS

    def excuse_stale(self) -> bool:
        """Return whether a kept-alive connection that ended early is no loss: only as the first failure."""
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
        """Return whether to wait for a worker to start in the place of one that stops."""
        self.num_waits += 1
        return not self.num_losses and self.num_waits <= MAX_WAITS


class RetryPolicy:
    """The rules for failed attempts, shared by every generation of this process.

    `refused`, `failed` and `lost` raise ApiError when the request shall not be tried again.
    """

    def __init__(self, fleet: Fleet, metrics: GatewayMetrics) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self.budget = RetryBudget()
        self._poison = PoisonCache()
        self.backpressure = BackpressureCache()

    def admit(self, spec: GenerationSpec) -> None:
        """Count a new request. Raises InternalError for one that is known as poison."""
        self.budget.earn()
        if spec in self._poison:
            raise InternalError("This request has failed a moment ago and is not tried again.")

    def refused(self, history: AttemptHistory, worker: WorkerMember, refusal: WorkerRefused) -> None:
        """Judge a refusal: the worker has begun nothing."""
        spec = history.spec
        self._metrics.refusals.inc(refusal.status if refusal.status in (400, 409, 429, 503) else "other")
        if refusal.failed.code == "queue_full":
            self.backpressure.add((worker.worker_id, worker.epoch), spec.tenant, refusal)
        if refusal.failed.code == "wrong_epoch":
            self._fleet.report_wrong_epoch(worker)
        may_retry = refusal.status in (401, 409, 429, 502, 503, 504)
        if not (may_retry and history.refused(worker, refusal) and self.budget.spend()):
            raise error_of(refusal.failed, spec, refusal.status) from refusal
        log.info("%s: worker %s refused: %s", spec.request_id, worker.worker_id, refusal)

    def failed(self, history: AttemptHistory, worker: WorkerMember, error: WorkerFailed) -> None:
        """Judge a Failed frame: the worker has given the request up."""
        if not error.failed.retryable:
            raise self._judged(history.spec, error_of(error.failed, history.spec)) from error
        if error.failed.code == "draining":
            log.info("%s: worker %s hands it over", history.spec.request_id, worker.worker_id)
            history.exclude(worker)
            return
        self.lost(history, worker, error)

    def lost(self, history: AttemptHistory, worker: WorkerMember, error: Exception) -> None:
        """Judge a lost worker, or one that gave up without stopping."""
        spec = history.spec
        if isinstance(error, StaleConnection) and history.excuse_stale():
            log.info("%s: worker %s is asked again: %s", spec.request_id, worker.worker_id, error)
            return
        self._metrics.lost.inc()
        log.warning("%s: worker %s lost: %s", spec.request_id, worker.worker_id, error)
        if isinstance(error, WorkerLost):
            self._fleet.report_failure(worker.worker_id)
        if (failure := history.lost(worker)) is not None:
            raise self._judged(spec, failure) from error

    def _judged(self, spec: GenerationSpec, failure: ApiError) -> ApiError:
        """Return the failure; remember the request as poison when the failure is its own."""
        if isinstance(failure, InternalError):
            log.error("%s: the request is refused from now on: it has failed on its own", spec.request_id)
            self._poison.add(spec)
            self._metrics.quarantined.inc()
        return failure


def no_worker_error(history: AttemptHistory, error: NoWorkerError) -> ApiError:
    """Say why there is no worker: those that refused or died say more than the router, which left them out."""
    if history.num_losses:
        return WorkerLostError("The worker was lost before it could answer.", retry_after_s=error.retry_after_s)
    if (refusal := history.soonest_refusal) is not None:
        return error_of(refusal.failed, history.spec, refusal.status)
    if error.contended:
        return OverloadedError(str(error), code="queue_full", retry_after_s=error.retry_after_s)
    return UnavailableError(str(error), retry_after_s=error.retry_after_s)


def backpressure_error(refusals: Mapping[WorkerIncarnation, WorkerRefused], spec: GenerationSpec) -> ApiError:
    """Repeat the refusal of the worker that will have room first."""
    soonest = min(refusals.values(), key=lambda refusal: refusal.retry_after_s)
    return error_of(soonest.failed, spec, soonest.status)


def error_of(failed: Failed, spec: GenerationSpec, status: int | None = None) -> ApiError:
    """Return what a worker's Failed frame means to the client."""
    match failed.code:
        case "context_length_exceeded":
            return ContextLengthError(failed.message, param=spec.prompt_param)
        case "invalid_grammar":
            return InvalidRequestError(failed.message, param=spec.grammar_param)
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
