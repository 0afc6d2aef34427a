"""Tracing by options and environment; a lost collector delays nothing."""

from __future__ import annotations

import logging
import threading

import pytest

from server.request_context import RequestContext
from tests.waiting import HANG_S, wait_until
from worker.common import tracing


@pytest.mark.parametrize(
    ("endpoint", "environment", "expected"),
    [
        (None, {}, False),
        ("http://collector:4318", {}, True),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, True),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"}, True),
        ("http://collector:4318", {"OTEL_SDK_DISABLED": "true"}, False),
        ("http://collector:4318", {"OTEL_TRACES_EXPORTER": "none"}, False),
        (None, {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, False),
    ],
)
def test_tracing_is_on_where_an_endpoint_is_named(
    endpoint: str | None, environment: dict[str, str], expected: bool
) -> None:
    assert tracing.wanted(endpoint, environment) is expected


def test_unsupported_tracing_settings_are_refused_by_name() -> None:
    for endpoint in ("collector:4317", "http://"):
        with pytest.raises(ValueError, match="--otlp-endpoint"):
            tracing.wanted(endpoint, {})
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_PROTOCOL"):
        tracing.wanted("http://collector:4317", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})


def test_lost_collector_does_not_delay_shutdown(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "SHUTDOWN_S", 0.05)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    gone = threading.Event()
    exporter = tracing.open_tracing("gateway", "http://127.0.0.1:9", "here")
    assert exporter is not None
    shutdown = exporter._provider.shutdown
    monkeypatch.setattr(exporter._provider, "shutdown", lambda: gone.wait(HANG_S))
    with caplog.at_level(logging.CRITICAL, "opentelemetry"):
        context = RequestContext("req_1", 0.0)
        context.begin_trace(exporter, {"path": "/v1/completions", "headers": []})
        assert context.trace is not None
        with context.trace.child("route"):
            pass
        exporter.close()
        assert [thread for thread in threading.enumerate() if thread.name == "tracing"], "the exporter still tries"
    gone.set()
    shutdown()
    # Its thread draws random waits, which would reach into the examples of other tests.
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("Otel")])
