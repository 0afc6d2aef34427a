"""What a generation's failed attempts mean: for the next attempt, for the fleet and the metrics, and for the client."""

from __future__ import annotations

import logging
from collections.abc import Mapping

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
from server.request.backend import Backend
from server.request.losses import Losses, Stage, again_s
from server.request.spec import GenerationSpec, ParamNames
from server.router.placement import NoWorkerError
from server.workers.client import StaleConnection, WorkerLost, WorkerRefused
from worker.wire import Failed

log = logging.getLogger(__name__)


class WorkerFailed(Exception):
    """The worker ended the stream with Failed."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(f"{failed.code}: {failed.message}")
        self.failed = failed


class Failures:
    """Of one generation: told of each failed attempt, it raises ApiError when the request shall not be tried again."""

    def __init__(self, spec: GenerationSpec, backend: Backend) -> None:
        self.losses = Losses()
        self._spec = spec
        self._backend = backend

    def refused(self, worker: WorkerMember, error: WorkerRefused) -> None:
        """The worker has begun nothing."""
        self._backend.metrics.refused(error.status)
        if error.failed.code == "queue_full":
            self._backend.full_queues.note((worker.worker_id, worker.epoch), self._spec.tenant, error)
        if error.failed.code == "wrong_epoch":
            self._backend.router.report_wrong_epoch(worker)
        may_pass = error.status in (401, 409, 429, 502, 503, 504)
        if not (may_pass and self.losses.refused(worker, error) and self._backend.budget.spend()):
            raise error_of(error.failed, self._spec.params, error.status) from error
        log.info("%s: worker %s refused: %s", self._spec.request_id, worker.worker_id, error)

    def failed(self, worker: WorkerMember, error: WorkerFailed, stage: Stage) -> None:
        """The worker said that it gives the request up."""
        if not error.failed.retryable:
            raise self._judged(error_of(error.failed, self._spec.params)) from error
        if error.failed.code == "draining":
            log.info("%s: worker %s hands it over", self._spec.request_id, worker.worker_id)
            self.losses.exclude(worker)
            return
        self.lost(worker, error, stage)

    def lost(self, worker: WorkerMember, error: Exception, stage: Stage) -> None:
        """The worker is gone, or gave up, with the attempt at `stage`."""
        if isinstance(error, StaleConnection) and self.losses.stale():
            log.info("%s: worker %s is asked anew: %s", self._spec.request_id, worker.worker_id, error)
            return
        self._backend.metrics.lost.inc()
        log.warning("%s: worker %s lost: %s", self._spec.request_id, worker.worker_id, error)
        if isinstance(error, WorkerLost):
            self._backend.router.report_failure(worker.worker_id)
        if (failure := self.losses.lost(worker, stage)) is not None:
            raise self._judged(failure) from error

    def full(self, refusals: Mapping[WorkerIncarnation, WorkerRefused]) -> ApiError:
        """What the worker with room first has said a moment ago."""
        refused = min(refusals.values(), key=again_s)
        return error_of(refused.failed, self._spec.params, refused.status)

    def no_worker(self, error: NoWorkerError) -> ApiError:
        """Workers that refused or died say more than the router, which was told to leave them out."""
        if self.losses.num_losses:
            return WorkerLostError("The worker was lost before it could answer.", retry_after_s=error.retry_after_s)
        if (refusal := self.losses.last_refusal) is not None:
            return error_of(refusal.failed, self._spec.params, refusal.status)
        if error.contended:
            return OverloadedError(str(error), code="queue_full", retry_after_s=error.retry_after_s)
        return UnavailableError(str(error), retry_after_s=error.retry_after_s)

    def _judged(self, failure: ApiError) -> ApiError:
        """The same; the request is quarantined when the failure is its own."""
        if isinstance(failure, InternalError):
            spec = self._spec
            log.error("%s: the request is quarantined: it has failed on its own", spec.request_id)
            self._backend.quarantine.add(spec.root, spec.prompt_ids, spec.sampling)
            self._backend.metrics.quarantined.inc()
        return failure


def error_of(failed: Failed, params: ParamNames, status: int | None = None) -> ApiError:
    """What a worker's Failed means to the client."""
    match failed.code:
        case "context_length_exceeded":
            return ContextLengthError(failed.message, param=params.prompt)
        case "invalid_grammar":
            return InvalidRequestError(failed.message, param=params.grammar)
        case "queue_full" | "queue_timeout" | "no_room" | "overloaded":
            retry_after_s = 1.0 if failed.retry_after_s is None else failed.retry_after_s
            return OverloadedError(failed.message, code="queue_full", retry_after_s=retry_after_s)
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
