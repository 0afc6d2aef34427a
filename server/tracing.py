"""OpenTelemetry spans of a gateway: off by default, and then OpenTelemetry is not imported.

    POST /v1/chat/completions          parent: the client's traceparent
      |-- validate, tokenise
      |-- route                        one a placement
      +-- generate                     one an attempt; the worker's spans are its children, by the request on the wire
            |-- first token
            +-- stream

Attributes are names, counts and codes: never text, token ids or the messages of errors.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version
from typing import TYPE_CHECKING, Final, Protocol

from cache.records import WorkerMember
from server.current import CURRENT

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

SERVICE: Final = "headstart-gateway"
SHUTDOWN_S: Final = 2.0
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_NO_STAGE: Final[AbstractContextManager[None]] = nullcontext()
_HEADERS: Final = (b"traceparent", b"tracestate")


def wanted(endpoint: str | None, environment: Mapping[str, str]) -> bool:
    """Whether spans are to be sent. Raises ValueError for what cannot be followed."""
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"--otlp-endpoint must be an http:// or https:// URL, got {endpoint!r}")
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    if endpoint is None and not any(environment.get(name) for name in _ENDPOINTS):
        return False
    for name in _PROTOCOLS:
        if environment.get(name, "http/protobuf") != "http/protobuf":
            raise ValueError(f"{name}: only http/protobuf is spoken, got {environment[name]!r}")
    return True


def open_tracing(endpoint: str | None, instance: str) -> Tracing | None:
    """None: not wanted. `endpoint` is the base URL of an OTLP/HTTP collector; else the OTEL_ variables say it."""
    return Tracing(_provider(endpoint, instance)) if wanted(endpoint, os.environ) else None


def _provider(endpoint: str | None, instance: str) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    attributes = {"service.version": version("headstart"), "service.instance.id": instance}
    if "OTEL_SERVICE_NAME" not in os.environ:
        attributes["service.name"] = SERVICE
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    url = None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces"
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return provider


class Outcome(Protocol):
    """What became of a request. `status` 0: the response never began."""

    status: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


class Tracing:
    """Owner of the exporter. `close` sends what is left, within SHUTDOWN_S."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("headstart")

    def begin(self, path: str, headers: Iterable[tuple[bytes, bytes]], request_id: str) -> RequestTrace | None:
        """None: this request is not sampled."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {name.decode(): value.decode("latin-1") for name, value in headers if name in _HEADERS}
        parent = TraceContextTextMapPropagator().extract(carrier)
        attributes = {"http.request.method": "POST", "http.route": path, "headstart.request_id": request_id}
        span = self._tracer.start_span(f"POST {path}", parent, SpanKind.SERVER, attributes)
        return RequestTrace(self._tracer, span) if span.is_recording() else None

    def close(self) -> None:
        closing = threading.Thread(target=self._provider.shutdown, name="tracing", daemon=True)
        closing.start()
        closing.join(SHUTDOWN_S)


class RequestTrace:
    """The spans of one request."""

    __slots__ = ("_context", "_span", "_tracer", "trace_id")

    def __init__(self, tracer: Tracer, span: Span) -> None:
        from opentelemetry.trace import format_trace_id, set_span_in_context

        self._tracer = tracer
        self._span = span
        self._context = set_span_in_context(span)
        self.trace_id = format_trace_id(span.get_span_context().trace_id)

    @contextmanager
    def stage(self, name: str) -> Iterator[Span]:
        span = self._tracer.start_span(name, self._context)
        try:
            yield span
        except Exception as error:
            _failed(span, error)
            raise
        finally:
            span.end()

    @contextmanager
    def attempt(self, worker: WorkerMember, promised_tokens: int) -> Iterator[AttemptTrace]:
        """A request at a worker, until its stream ends or is left."""
        from opentelemetry.trace import SpanKind

        attributes: dict[str, str | int] = {
            "gen_ai.request.model": worker.model,
            "headstart.worker": worker.worker_id,
            "headstart.promised_tokens": promised_tokens,
        }
        span = self._tracer.start_span("generate", self._context, SpanKind.CLIENT, attributes)
        attempt = AttemptTrace(self._tracer, span)
        try:
            yield attempt
        except (GeneratorExit, asyncio.CancelledError):
            span.set_attribute("headstart.aborted", True)
            raise
        except Exception as error:
            _failed(span, error)
            raise
        finally:
            attempt.end()

    def fail(self, error: Exception) -> None:
        """The answer broke after its status was sent."""
        _failed(self._span, error)

    def end(self, outcome: Outcome) -> None:
        from opentelemetry.trace import StatusCode

        span = self._span
        if outcome.status:
            span.set_attribute("http.response.status_code", outcome.status)
        if not outcome.status or outcome.status >= 500:
            span.set_status(StatusCode.ERROR)
        span.set_attribute("gen_ai.usage.input_tokens", outcome.num_prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", outcome.num_output_tokens)
        span.set_attribute("headstart.cached_tokens", outcome.num_cached_tokens)
        span.end()


class AttemptTrace:
    """The spans of one attempt: until the first token, and from there to the end."""

    __slots__ = ("_context", "_part", "_span", "_tracer")

    def __init__(self, tracer: Tracer, span: Span) -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracer = tracer
        self._span = span
        self._context: Context = set_span_in_context(span)
        self._part = tracer.start_span("first token", self._context)

    def carrier(self) -> dict[str, str]:
        """`traceparent`, and `tracestate` where there is one."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, self._context)
        return carrier

    def first_token(self, num_cached_tokens: int | None) -> None:
        self._part.end()
        self._part = self._tracer.start_span("stream", self._context)
        if num_cached_tokens is not None:
            self._span.set_attribute("headstart.cached_tokens", num_cached_tokens)

    def end(self) -> None:
        self._part.end()
        self._span.end()


def stage(name: str) -> AbstractContextManager[Span | None]:
    """A part of the running request's time; nothing when it is not traced."""
    request = CURRENT.get()
    return _NO_STAGE if request is None or request.trace is None else request.trace.stage(name)


def attempt(worker: WorkerMember, promised_tokens: int) -> AbstractContextManager[AttemptTrace | None]:
    """As `stage`, for a request at a worker."""
    request = CURRENT.get()
    return _NO_STAGE if request is None or request.trace is None else request.trace.attempt(worker, promised_tokens)


def _failed(span: Span, error: Exception) -> None:
    """By the error's name: its text may quote the request."""
    from opentelemetry.trace import StatusCode

    span.set_status(StatusCode.ERROR)
    span.set_attribute("error.type", type(error).__name__)
