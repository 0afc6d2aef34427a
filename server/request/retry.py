"""Decide whether a failed attempt is repeated, and which error the client gets when it is not.

A request that a worker had accepted but not yet given a token may have killed it: it is a poison candidate. The next
worker prefills candidates one at a time and sends Started for each: a second death has at most one culprit. A token
clears a request.

Source: docs/reliability.md, "How it works".
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
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
from server.request.choice import GenerationSpec
from server.request.services import RequestServices
from server.router.queue import Refusals
from server.router.types import NoWorkerError
from server.workers.connection import StaleConnection, WorkerAbsent, WorkerLost, WorkerRefused
from worker.wire import Failed

log = logging.getLogger(__name__)

MAX_SUSPICIONS: Final = 2
"""A request counts as poison after this many deaths during its prefill."""
MAX_LOSSES: Final = 5  # that many deaths point to the request, or to the whole fleet
MAX_REFUSALS: Final = 8  # each costs a round trip: after more, the client learns too late that the fleet is full
MAX_READMISSIONS: Final = 2  # times that workers lost earlier are tried again: they may have restarted
MAX_WAITS: Final = 12
"""Searches with `PAUSE_S` between them, 3 s in all: the fleet's poll finds a worker that has become ready."""
_RETRIED_STATUSES: Final = frozenset({409, 429, 502, 503, 504})
_REPLACED: Final = frozenset({"wrong_epoch", "not_ready", "wrong_protocol", "unsupported"})
"""Refusals by another process, or another epoch, at the address of the chosen worker. Its record here is old."""


class WorkerFailed(Exception):
    """The worker ended the stream with a Failed frame."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(f"{failed.code}: {failed.message}")
        self.failed = failed


class Stage(Enum):
    """The progress of an attempt."""

    SENT = auto()
    ACCEPTED = auto()
    PREFILLING = auto()
    """The worker has reported the start of the prefill."""
    ANSWERED = auto()
    """A token has arrived."""


class AttemptHistory:
    """The attempts of one generation: the progress of the current one, and how the others failed."""

    def __init__(self, spec: GenerationSpec, services: RequestServices) -> None:
        self._spec = spec
        self._services = services
        self.stage = Stage.SENT
        self.has_answer = False
        """A token has arrived, in whatever attempt."""
        self.excluded: frozenset[WorkerIncarnation] = frozenset()
        """Workers excluded for this request until they restart."""
        self.num_losses = 0
        self._num_deaths = 0
        """Losses of workers that may have received the request, and may be lost because of it."""
        self.num_suspicions = 0
        """Workers lost during the request's prefill; above 0 it is a poison candidate."""
        self.full: frozenset[WorkerIncarnation] = frozenset()
        """Excluded only because their queue was full."""
        self.least_context = 0
        """Workers with a shorter context cannot take the request."""
        self._refusals: list[WorkerRefused] = []
        self._num_refusals = 0
        self._num_readmissions = 0
        self._num_waits = 0

    def answered(self) -> None:
        """Record the attempt's first token: the request is no poison candidate."""
        self.stage, self.has_answer = Stage.ANSWERED, True
        self.num_suspicions = 0

    def failed(self, worker: WorkerMember, error: WorkerRefused | WorkerFailed | WorkerLost) -> None:
        """Record how the attempt failed. Raises ApiError when no other may follow."""
        failure: ApiError | None = None
        is_too_long = not isinstance(error, WorkerLost) and error.failed.code == "context_length_exceeded"
        match error:
            case _ if is_too_long and worker.max_model_len < self._spec.model.max_model_len:
                self.least_context = worker.max_model_len + 1
            case WorkerRefused(status=401 | 403):  # a worker of another fleet
                failure = self._lost(worker, WorkerAbsent(str(error)))
            case WorkerRefused():
                failure = self._refused(worker, error)
            case WorkerFailed(failed=Failed(retryable=False) as failed):
                failure = error_of(failed, self._spec)
            case WorkerFailed(failed=Failed(code="queue_full") as failed):  # by another engine, through its adapter
                failure = self._refused(worker, WorkerRefused(429, failed))
            case WorkerFailed(failed=Failed(code="draining" | "not_ready")):
                self._exclude(worker)
            case StaleConnection() if not self._num_refusals:  # it was closed while idle: once, try that worker again
                self._num_refusals = 1
            case _:
                failure = self._lost(worker, error)
        if failure is None:
            log.info("%s: attempt at worker %s failed, retrying: %s", self._spec.request_id, worker.worker_id, error)
            return
        # A worker that refused it has not run it. Any other internal error is the request's: it would hit each worker.
        if isinstance(failure, InternalError) and not isinstance(error, WorkerRefused):
            log.error("%s: quarantining poison request", self._spec.request_id)
            self._services.poison.add(self._spec)
            self._services.metrics.quarantined.inc()
        try:
            raise failure from error
        finally:
            del failure  # else the traceback's frame would make a cycle

    def readmit_lost(self) -> bool:
        """Allow workers lost earlier to be tried again. Return False if that is not allowed."""
        if not self.num_losses or self.num_suspicions or self._num_readmissions >= MAX_READMISSIONS:
            return False
        self._num_readmissions += 1
        self.excluded = frozenset()
        return True

    def readmit_full(self) -> None:
        """Allow workers whose queue was full to be asked again, after a pause."""
        self.excluded, self.full = self.excluded - self.full, frozenset()

    def may_wait(self) -> bool:
        """Return whether to wait for another worker. A poison candidate waits too: its lost workers stay excluded."""
        self._num_waits += 1
        return (not self.num_losses or self.num_suspicions > 0) and self._num_waits <= MAX_WAITS

    def no_worker_error(self, error: NoWorkerError, full: Refusals | None = None, *, resumed: bool = False) -> ApiError:
        """Return the error for the client. Workers' own errors are preferred to the router's.

        `full`: how each full worker has refused. `resumed`: the client has a part of the answer.
        """
        if full:
            return soonest_error(full.values(), self._spec)
        if resumed:
            message = "The worker was lost and no other can continue its answer."
            return WorkerLostError(message, retry_after_s=error.retry_after_s)
        if error.longest_context is not None:
            num_tokens = len(self._spec.prompt_ids)
            message = f"your prompt resulted in {num_tokens} tokens, next to those that you asked for"
            return ContextLengthError(
                message, error.longest_context, num_tokens=num_tokens, param=self._spec.prompt_param
            )
        if self.num_losses:
            return WorkerLostError("The worker was lost before it could answer.", retry_after_s=error.retry_after_s)
        return soonest_error(self._refusals, self._spec) if self._refusals else error

    def _exclude(self, worker: WorkerMember) -> None:
        self.excluded |= {(worker.worker_id, worker.epoch)}

    def _refused(self, worker: WorkerMember, refusal: WorkerRefused) -> ApiError | None:
        services, spec, failed = self._services, self._spec, refusal.failed
        refusal = WorkerRefused(refusal.status, failed)  # without a traceback, which would keep the request alive
        services.metrics.refusals.inc(refusal.status if refusal.status in (400, 409, 429, 503) else "other")
        if failed.code == "queue_full":
            self.full |= {(worker.worker_id, worker.epoch)}
            services.queue.refused((worker.worker_id, worker.epoch), spec.tenant, refusal)
        if is_replaced := failed.code in _REPLACED:
            services.fleet.report_wrong_epoch(worker)
        if refusal.status in _RETRIED_STATUSES or failed.retryable:
            self._refusals.append(refusal)
            self._num_refusals += 1
            if refusal.status != 409 or self._num_refusals > 1:  # 409: it has restarted, its new epoch may be tried
                self._exclude(worker)
            if self._num_refusals <= MAX_REFUSALS and (is_replaced or not services.budget.take(time.monotonic())):
                return None
            return soonest_error(self._refusals, spec)
        return error_of(failed, spec, refusal.status)

    def _lost(self, worker: WorkerMember, error: WorkerLost | WorkerFailed) -> ApiError | None:
        """Record a lost worker, or one that sent a retryable Failed frame."""
        self._services.metrics.lost.inc()
        log.warning("%s: worker %s lost: %s", self._spec.request_id, worker.worker_id, error)
        if isinstance(error, WorkerLost):
            self._services.fleet.report_failure(worker.worker_id)
        self._exclude(worker)
        self.full -= {(worker.worker_id, worker.epoch)}
        self.num_losses += 1
        if isinstance(error, WorkerAbsent):
            return None
        self._num_deaths += 1
        # A candidate is suspected again only in its prefill: the next worker sends Started for one at a time.
        if self.stage is Stage.PREFILLING or (self.stage is Stage.ACCEPTED and not self.num_suspicions):
            self.num_suspicions += 1
        if self.num_suspicions >= MAX_SUSPICIONS:
            return InternalError("The request failed on several workers and is not tried again.")
        if self._num_deaths >= MAX_LOSSES:
            return WorkerLostError("The request has lost too many workers.", retry_after_s=1.0)
        return None


def soonest_error(refusals: Iterable[WorkerRefused], spec: GenerationSpec) -> ApiError:
    """Return the refusal of the worker that will accept requests soonest."""
    soonest = min(refusals, key=lambda refusal: refusal.retry_after_s)
    return error_of(soonest.failed, spec, soonest.status)


def error_of(failed: Failed, spec: GenerationSpec, status: int | None = None) -> ApiError:
    """Return the client's error for a worker's Failed frame."""
    match failed.code, status:
        case "context_length_exceeded", _ if spec.text_request is not None:  # the engine's own words
            return InvalidRequestError(failed.message, param=failed.param, code=failed.code)
        case "context_length_exceeded", _:
            message, num_tokens = failed.message.rstrip("."), len(spec.prompt_ids)
            return ContextLengthError(message, spec.model.max_model_len, num_tokens=num_tokens, param=spec.prompt_param)
        case "invalid_grammar", _:
            return InvalidRequestError(failed.message, param=spec.grammar_param)
        case "queue_full" | "queue_timeout", _:
            asked_s = 1.0 if failed.retry_after_s is None else failed.retry_after_s
            return OverloadedError(failed.message, code="queue_full", retry_after_s=asked_s)
        case "payload_too_large", _:
            return BodyTooLargeError("The request is too large for a worker.")
        case "deadline", _:
            return DeadlineError(failed.message)
        case code, _ if status == 400 or code.startswith("invalid"):
            return InvalidRequestError(failed.message, param=failed.param)
        case _, 429:
            return OverloadedError(failed.message, code="queue_full", retry_after_s=1.0)
    if status in _RETRIED_STATUSES or failed.retryable:
        return UnavailableError("The worker could not take the request; try again.", retry_after_s=1.0)
    log.error("a worker failed a request: %s: %s", failed.code, failed.message)
    return InternalError("The worker met an internal error.")
