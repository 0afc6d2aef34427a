"""What the client hears of a worker's refusals and failures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from server.request.failures import Failures, error_of
from server.request.spec import ParamNames
from server.router.placement import NoWorkerError
from worker.wire import Failed

PARAMS = ParamNames(prompt="messages", grammar="response_format")


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
def test_a_workers_words_are_openais(code: str, status: int | None, expected: tuple[Any, ...]) -> None:
    error = error_of(Failed(code, "at /secret", retryable=False, retry_after_s=7.5), PARAMS, status)
    assert (error.status, error.code, error.param, error.retry_after_s) == expected
    if error.code == "internal_error":
        assert "secret" not in error.message


@pytest.mark.parametrize(("contended", "status"), [(True, 429), (False, 503)])
def test_without_a_worker_it_is_the_load_or_the_fleet(contended: bool, status: int) -> None:
    failures = Failures(SimpleNamespace(params=PARAMS), SimpleNamespace())  # type: ignore[arg-type]
    error = failures.no_worker(NoWorkerError("none", contended=contended, retry_after_s=3.0))
    assert (error.status, error.retry_after_s) == (status, 3.0)
