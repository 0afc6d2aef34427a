"""The retry policy: attempts that are repeated, and the errors for those that are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from server.errors import ApiError, InternalError, WorkerLostError
from server.metrics import GatewayMetrics
from server.request.retry import (
    MAX_LOSSES,
    MAX_READMISSIONS,
    MAX_REFUSALS,
    MAX_WAITS,
    AttemptHistory,
    Stage,
    WorkerFailed,
    error_of,
)
from server.request.services import PoisonCache, retry_budget
from server.router.queue import RequestQueue
from server.router.types import NoWorkerError
from server.workers.connection import StaleConnection, WorkerLost, WorkerRefused
from tests.members import make_member
from worker.wire import Failed, SamplingParams

SPEC: Any = SimpleNamespace(
    request_id="r",
    model=SimpleNamespace(max_model_len=2048),
    tenant="",
    prompt_param="messages",
    grammar_param="response_format",
    root=b"r" * 16,
    prompt_ids=[1],
    sampling=SamplingParams(max_tokens=1),
    embed=None,
    media=(),
    text_request=None,
)
FLEET: Any = SimpleNamespace(report_failure=lambda worker_id: None, report_wrong_epoch=lambda member: None)


def new_history() -> AttemptHistory:
    services: Any = SimpleNamespace(
        fleet=FLEET, metrics=GatewayMetrics(), queue=RequestQueue(), budget=retry_budget(), poison=PoisonCache()
    )
    return AttemptHistory(SPEC, services)


def failure(
    history: AttemptHistory, error: WorkerRefused | WorkerFailed | WorkerLost, name: str = "w"
) -> ApiError | None:
    """Return why the request is not tried again."""
    try:
        history.failed(make_member(name), error)
    except ApiError as failure:
        return failure
    return None


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        ("context_length_exceeded", 400, (400, "context_length_exceeded", "messages", None)),
        ("invalid_grammar", 400, (400, None, "response_format", None)),
        ("invalid_request", 400, (400, None, None, None)),
        ("queue_full", 429, (429, "queue_full", None, 7.5)),
        ("queue_timeout", 429, (429, "queue_full", None, 7.5)),
        ("draining", 503, (503, "service_unavailable", None, 1.0)),
        ("wrong_epoch", 409, (503, "service_unavailable", None, 1.0)),
        ("payload_too_large", 413, (413, "request_too_large", None, None)),
        ("deadline", None, (504, "timeout", None, None)),
        ("of a newer worker", 400, (400, None, None, None)),
        ("of a newer worker", 429, (429, "queue_full", None, 1.0)),
        ("of a newer worker", 503, (503, "service_unavailable", None, 1.0)),
        ("of a newer worker", 500, (500, "internal_error", None, None)),
        ("internal_error", None, (500, "internal_error", None, None)),
    ],
)
def test_failed_frames_become_openai_errors(code: str, status: int | None, expected: tuple[Any, ...]) -> None:
    error = error_of(Failed(code, "at /secret", retryable=False, retry_after_s=7.5), SPEC, status)
    assert (error.status, error.code, error.param, error.retry_after_s) == expected
    if error.code == "internal_error":
        assert "secret" not in error.message


def test_a_request_that_fits_no_worker_is_too_long() -> None:
    none = NoWorkerError("none", retry_after_s=3.0, longest_context=8)
    error = new_history().no_worker_error(none)
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "messages")
    assert "maximum context length is 8 tokens" in error.message


def lost(history: AttemptHistory, stage: Stage) -> ApiError | None:
    history.stage = stage
    return failure(history, WorkerLost("gone"))


def refusal(status: int = 429, retry_after_s: float | None = None) -> WorkerRefused:
    return WorkerRefused(status, Failed("queue_full", "full", retryable=True, retry_after_s=retry_after_s))


def test_two_deaths_in_its_prefill_make_a_request_poison() -> None:
    history = new_history()
    assert lost(history, Stage.SENT) is None
    assert history.num_suspicions == 0, "it never had the request"
    assert lost(history, Stage.ACCEPTED) is None
    assert history.num_suspicions == 1
    assert lost(history, Stage.ACCEPTED) is None, "its prefill is announced before it is computed"
    assert isinstance(lost(history, Stage.PREFILLING), InternalError)


def test_a_token_clears_a_request() -> None:
    history = new_history()
    for _ in range(MAX_LOSSES - 1):
        assert lost(history, Stage.PREFILLING) is None
        history.answered()
        assert history.num_suspicions == 0
    assert isinstance(lost(history, Stage.ANSWERED), WorkerLostError), "the number of losses is limited too"


def test_a_lost_request_keeps_the_hint_of_the_router() -> None:
    history = new_history()
    assert lost(history, Stage.ACCEPTED) is None
    error = history.no_worker_error(NoWorkerError("none", retry_after_s=7.0))
    assert isinstance(error, WorkerLostError)
    assert error.retry_after_s == 7.0


def test_refusals_are_limited_and_the_soonest_is_reported() -> None:
    history = new_history()
    for retry_after_s in (5.0, 2.0, 9.0):
        assert failure(history, refusal(retry_after_s=retry_after_s)) is None
    error = history.no_worker_error(NoWorkerError("none", retry_after_s=7.0))
    assert (error.code, error.retry_after_s) == ("queue_full", 2.0)
    others = [failure(history, refusal(retry_after_s=9.0)) for _ in range(MAX_REFUSALS - 2)]
    assert [error and error.retry_after_s for error in others] == [None] * (MAX_REFUSALS - 3) + [2.0]


def test_the_first_stale_connection_is_no_loss() -> None:
    history = new_history()
    for num_losses in (0, 1):
        assert failure(history, StaleConnection("closed")) is None
        assert history.num_losses == num_losses


def test_lost_workers_are_readmitted() -> None:
    """Unless the request is a poison candidate."""
    history = new_history()
    assert not history.readmit_lost(), "no worker was lost"
    lost(history, Stage.ANSWERED)
    for _ in range(MAX_READMISSIONS):
        assert history.readmit_lost()
        assert history.excluded == set()
    assert not history.readmit_lost()
    candidate = new_history()
    lost(candidate, Stage.PREFILLING)
    assert not candidate.readmit_lost()


@pytest.mark.parametrize(
    ("stage", "num_waits"), [(None, MAX_WAITS), (Stage.PREFILLING, MAX_WAITS), (Stage.ANSWERED, 0)]
)
def test_a_request_that_may_not_go_back_waits_for_a_while(stage: Stage | None, num_waits: int) -> None:
    """Others go back to a worker that they lost. A poison candidate without another worker waits for one."""
    history = new_history()
    if stage is not None:
        lost(history, stage)
    assert [history.may_wait() for _ in range(MAX_WAITS + 1)].count(True) == num_waits
