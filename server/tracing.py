"""The spans of one request at a gateway.

POST /v1/chat/completions          parent: the client's traceparent
  |-- validate, tokenise
  |-- route                        one a placement
  +-- generate                     one an attempt; the worker's spans are its children, by the request on the wire
        |-- first token
        +-- stream
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

from cache.records import WorkerMember
from worker.common.tracing import Tracing, as_parent, mark_failed

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

SERVICE: Final = "headstart-gateway"
_HEADERS: Final = (b"traceparent", b"tracestate")


class Outcome(Protocol):
    """How a request ended. `status` 0: the response never began."""

    status: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


class RequestTrace:
    """The spans of one request."""

    __slots__ = ("_context", "_span", "_tracer", "trace_id")

    def __init__(self, tracer: Tracer, span: Span) -> None:
        from opentelemetry.trace import format_trace_id

        self._tracer = tracer
        self._span = span
        self._context = as_parent(span)
        self.trace_id = format_trace_id(span.get_span_context().trace_id)

    @classmethod
    def begin(
        cls, tracing: Tracing, path: str, headers: Iterable[tuple[bytes, bytes]], request_id: str
    ) -> RequestTrace | None:
        """Return None for a request that is not sampled."""
        carrier = {name.decode(): value.decode("latin-1") for name, value in headers if name in _HEADERS}
        attributes = {"http.request.method": "POST", "http.route": path, "headstart.request_id": request_id}
        span = tracing.begin(f"POST {path}", carrier, attributes)
        return None if span is None else cls(tracing.tracer, span)

    @contextmanager
    def stage(self, name: str) -> Iterator[Span]:
        """Record a part of the request's time."""
        span = self._tracer.start_span(name, self._context)
        try:
            yield span
        except Exception as error:
            mark_failed(span, type(error).__name__)
            raise
        finally:
            span.end()

    @contextmanager
    def attempt(self, worker: WorkerMember, promised_tokens: int) -> Iterator[AttemptTrace]:
        """Record the request at one worker, until its stream ends or is left."""
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
            mark_failed(span, type(error).__name__)
            raise
        finally:
            attempt.end()

    def fail(self, error: Exception) -> None:
        """Record that the answer broke after its status was sent."""
        mark_failed(self._span, type(error).__name__)

    def end(self, outcome: Outcome) -> None:
        span = self._span
        if outcome.status:
            span.set_attribute("http.response.status_code", outcome.status)
        if not outcome.status or outcome.status >= 500:
            mark_failed(span)
        span.set_attribute("gen_ai.usage.input_tokens", outcome.num_prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", outcome.num_output_tokens)
        span.set_attribute("headstart.cached_tokens", outcome.num_cached_tokens)
        span.end()


class AttemptTrace:
    """The spans of one attempt: until the first token, and from there to the end."""

    __slots__ = ("_context", "_part", "_span", "_tracer")

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._context = as_parent(span)
        self._part = tracer.start_span("first token", self._context)

    def carrier(self) -> dict[str, str]:
        """Return `traceparent`, and `tracestate` where there is one."""
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
