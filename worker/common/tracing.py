"""OpenTelemetry, off by default: then it is not even imported.

Attributes of spans are names, counts and codes: never text, token ids or the messages of errors.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from worker.common.checks import missing_extra
from worker.common.command_line import check_web_url

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, SpanContext

SHUTDOWN_S: Final = 2.0  # spans are not worth a slow stop
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class Tracing:
    """Owner of the exporter."""

    def __init__(self, provider: TracerProvider, of_sampled: TracerProvider) -> None:
        """`of_sampled` has the same exporter, and samples only spans that link to sampled ones."""
        self._provider = provider
        self.tracer = provider.get_tracer("headstart")
        self._of_sampled = of_sampled.get_tracer("headstart")

    def begin(self, name: str, carrier: Mapping[str, str], attributes: Mapping[str, str | int]) -> Span:
        """Start the span of a request, as a child of the carrier's `traceparent`. It records if it is sampled."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(carrier)
        return self.tracer.start_span(name, parent, SpanKind.SERVER, dict(attributes))

    def begin_linked(
        self, name: str, links: Sequence[SpanContext], attributes: Mapping[str, str | int], begun_ns: int
    ) -> Span:
        """Start a span in a trace of its own, with links to spans that are sampled: so it is too."""
        from opentelemetry.context import Context
        from opentelemetry.trace import Link

        linked = [Link(context) for context in links]
        return self._of_sampled.start_span(
            name, Context(), attributes=dict(attributes), links=linked, start_time=begun_ns
        )

    def close(self) -> None:
        """Send what is left, within SHUTDOWN_S."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing", daemon=True)
        closing.start()
        closing.join(SHUTDOWN_S)


def open_tracing(service: str, endpoint: str | None, instance: str) -> Tracing | None:
    """Return None where no spans are wanted.

    `endpoint` is the base URL of an OTLP/HTTP collector; without it the OTEL_ variables name one. Raises ValueError
    for settings that are not supported, and without the packages of the extra `otel`.
    """
    if not wanted(endpoint, os.environ):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON
    except ImportError as error:
        raise ValueError(missing_extra(error)) from error

    attributes = {"service.version": version("headstart"), "service.instance.id": instance}
    if "OTEL_SERVICE_NAME" not in os.environ:
        attributes["service.name"] = service
    resource = Resource.create(attributes)
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    of_sampled = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False)
    url = None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces"
    processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=url))
    provider.add_span_processor(processor)
    of_sampled.add_span_processor(processor)
    return Tracing(provider, of_sampled)


def wanted(endpoint: str | None, environment: Mapping[str, str]) -> bool:
    """Return whether to send spans. Raises ValueError for a setting that is not supported."""
    if endpoint is not None:
        check_web_url("--otlp-endpoint", endpoint)
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    if endpoint is None and not any(environment.get(name) for name in _ENDPOINTS):
        return False
    for name in _PROTOCOLS:
        if environment.get(name, "http/protobuf") != "http/protobuf":
            raise ValueError(f"{name}: only http/protobuf is supported, got {environment[name]!r}")
    return True


def as_parent(span: Span) -> Context:
    """Return the context in which a span's children start."""
    from opentelemetry.trace import set_span_in_context

    return set_span_in_context(span)


def mark_failed(span: Span, error_type: str | None = None) -> None:
    """Record only the type of the error: its text may quote the request."""
    from opentelemetry.trace import StatusCode

    span.set_status(StatusCode.ERROR)
    if error_type is not None:
        span.set_attribute("error.type", error_type)
