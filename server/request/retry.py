"""Decide whether a failed attempt is repeated, and name the error that the client gets when it is not.

A worker's death says little about its requests, except for those that it had accepted but not yet given a token: these
are poison candidates. The next worker prefills candidates one at a time, and sends Started for each, so that a second
death has one culprit at most. A token clears a request.

Source: docs/reliability.md, "How it works".
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
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
    as_api_error,
)
from server.metrics import GatewayMetrics
from server.request.choice import GenerationSpec
from server.request.limits import BackpressureCache, PoisonCache, RetryBudget
from server.router.types import NoWorkerError
from server.workers.connection import StaleConnection, WorkerAbsent, WorkerLost, WorkerRefused
from server.workers.fleet import Fleet
from worker.wire import Failed

log = logging.getLogger(__name__)

MAX_SUSPICIONS: Final = 2
"""At this many deaths during its prefill, a request counts as poison."""
MAX_LOSSES: Final = 5
MAX_REFUSALS: Final = 8
MAX_READMISSIONS: Final = 2
MAX_WAITS: Final = 4
_RETRIED_STATUSES: Final = frozenset({409, 429, 502, 503, 504})
_REPLACED: Final = frozenset({"wrong_epoch", "not_ready", "wrong_protocol"})
"""Refusals that say: another process, or another epoch, has the place of the worker that was chosen."""


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


@dataclass(slots=True, eq=False)
class RetryState:
    """The state shared by every generation of this process, for judging failed attempts."""

    fleet: Fleet
    metrics: GatewayMetrics
    budget: RetryBudget = field(default_factory=RetryBudget)
    poison: PoisonCache = field(default_factory=PoisonCache)
    backpressure: BackpressureCache = field(default_factory=BackpressureCache)


class AttemptHistory:
    """The attempts of one generation: how far the current one has come, and how the others failed."""

    def __init__(self, spec: GenerationSpec, state: RetryState) -> None:
        self._spec = spec
        self._state = state
        self.stage = Stage.SENT
        self.excluded: frozenset[WorkerIncarnation] = frozenset()
        """Workers that shall not get the request again, unless they have restarted."""
        self.num_losses = 0
        self._num_deaths = 0
        """Losses of workers that may have had the request, and may be lost because of it."""
        self.num_suspicions = 0
        """Workers that were lost in the request's prefill: it is a poison candidate."""
        self._refusals: list[WorkerRefused] = []
        self._num_refusals = 0
        self._num_readmissions = 0
        self._num_waits = 0

    def answered(self) -> None:
        """Record the attempt's first token: the request is no poison candidate."""
        self.stage = Stage.ANSWERED
        self.num_suspicions = 0

    def failed(self, worker: WorkerMember, error: WorkerRefused | WorkerFailed | WorkerLost) -> None:
        """Record how the attempt failed. Raises ApiError when no other may follow."""
        failure: ApiError | None = None
        match error:
            case WorkerRefused(status=401 | 403):  # a worker of another fleet
                failure = self._lost(worker, WorkerAbsent(str(error)))
            case WorkerRefused():
                failure = self._refused(worker, error)
            case WorkerFailed(failed=Failed(retryable=False) as failed):
                failure = error_of(failed, self._spec)
            case WorkerFailed(failed=Failed(code="queue_full") as failed):  # by another engine, behind its adapter
                failure = self._refused(worker, WorkerRefused(429, failed))
            case WorkerFailed(failed=Failed(code="draining" | "not_ready")):
                self._exclude(worker)
            case StaleConnection() if not self._num_refusals:  # closed while idle: the same worker may have it
                self._num_refusals = 1
            case _:
                failure = self._lost(worker, error)
        if failure is None:
            log.info(
                "%s: another attempt follows that at worker %s: %s", self._spec.request_id, worker.worker_id, error
            )
            return
        if isinstance(failure, InternalError) and not isinstance(error, WorkerRefused):
            log.error("%s: the request is refused from now on: it has failed on its own", self._spec.request_id)
            self._state.poison.add(self._spec)
            self._state.metrics.quarantined.inc()
        try:
            raise failure from error
        finally:
            del failure  # in the traceback's frame it would be a cycle

    def readmit_lost(self) -> bool:
        """Let the lost workers have the request again, if they live. Return whether that is allowed."""
        if not self.num_losses or self.num_suspicions or self._num_readmissions >= MAX_READMISSIONS:
            return False
        self._num_readmissions += 1
        self.excluded = frozenset()
        return True

    def may_wait(self) -> bool:
        """Return whether to wait for a worker to start in the place of one that stops."""
        self._num_waits += 1
        return not self.num_losses and self._num_waits <= MAX_WAITS

    def no_worker_error(self, error: NoWorkerError) -> ApiError:
        """Say why there is no worker. Prefer the workers' own errors to the router's."""
        if error.unsupported:
            param = self._spec.grammar_param if error.unsupported[0].startswith("grammar:") else error.unsupported[0]
            return InvalidRequestError(f"{error} Leave it out, or ask for another model.", param=param)
        if error.longest_context is not None:
            num_tokens = len(self._spec.prompt_ids)
            message = f"your prompt resulted in {num_tokens} tokens, next to those that you asked for"
            return ContextLengthError(
                message, error.longest_context, num_tokens=num_tokens, param=self._spec.prompt_param
            )
        if self.num_losses:
            return WorkerLostError("The worker was lost before it could answer.", retry_after_s=error.retry_after_s)
        return soonest_error(self._refusals, self._spec) if self._refusals else as_api_error(error)

    def _exclude(self, worker: WorkerMember) -> None:
        self.excluded |= {(worker.worker_id, worker.epoch)}

    def _refused(self, worker: WorkerMember, refusal: WorkerRefused) -> ApiError | None:
        state, spec, failed = self._state, self._spec, refusal.failed
        refusal = WorkerRefused(refusal.status, failed)  # it is kept, and its traceback would keep the request
        state.metrics.refusals.inc(refusal.status if refusal.status in (400, 409, 429, 503) else "other")
        if failed.code == "queue_full":
            state.backpressure.add((worker.worker_id, worker.epoch), spec.tenant, refusal)
        is_replaced = failed.code in _REPLACED
        if is_replaced:
            state.fleet.report_wrong_epoch(worker)
        if refusal.status in _RETRIED_STATUSES or failed.retryable:
            self._refusals.append(refusal)
            self._num_refusals += 1
            if refusal.status != 409 or self._num_refusals > 1:  # 409: it has restarted, and its new epoch may have it
                self._exclude(worker)
            if self._num_refusals <= MAX_REFUSALS and (is_replaced or state.budget.spend()):
                return None
        return error_of(failed, spec, refusal.status)

    def _lost(self, worker: WorkerMember, error: WorkerLost | WorkerFailed) -> ApiError | None:
        """Record a lost worker, or one that sent a retryable Failed frame."""
        self._state.metrics.lost.inc()
        log.warning("%s: worker %s lost: %s", self._spec.request_id, worker.worker_id, error)
        if isinstance(error, WorkerLost):
            self._state.fleet.report_failure(worker.worker_id)
        self._exclude(worker)
        self.num_losses += 1
        if isinstance(error, WorkerAbsent):
            return None
        self._num_deaths += 1
        # A candidate is not suspected again before its prefill: the next worker says Started for one at a time.
        if self.stage is Stage.PREFILLING or (self.stage is Stage.ACCEPTED and not self.num_suspicions):
            self.num_suspicions += 1
        if self.num_suspicions >= MAX_SUSPICIONS:
            return InternalError("The request failed on several workers and is not tried again.")
        if self._num_deaths >= MAX_LOSSES:
            return WorkerLostError("The request has lost too many workers.", retry_after_s=1.0)
        return None


def soonest_error(refusals: Iterable[WorkerRefused], spec: GenerationSpec) -> ApiError:
    """Repeat the refusal of the worker that will have room first."""
    soonest = min(refusals, key=lambda refusal: refusal.retry_after_s)
    return error_of(soonest.failed, spec, soonest.status)


def error_of(failed: Failed, spec: GenerationSpec, status: int | None = None) -> ApiError:
    """Return what a worker's Failed frame means to the client."""
    match failed.code, status:
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
            return InvalidRequestError(failed.message)
        case _, 429:
            return OverloadedError(failed.message, code="queue_full", retry_after_s=1.0)
    if status in _RETRIED_STATUSES or failed.retryable:
        return UnavailableError("The worker could not take the request; try again.", retry_after_s=1.0)
    log.error("a worker failed a request: %s: %s", failed.code, failed.message)
    return InternalError("The worker met an internal error.")
