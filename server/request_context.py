"""The context of a request, for its handlers, the log and its spans:

POST /v1/chat/completions          parent: the client's traceparent
  |-- validate, tokenise
  |-- route                        one a placement
  +-- generate                     one an attempt; the worker's spans are its children, by the request on the wire
        |-- first token
        +-- stream
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from starlette.types import Scope

from cache.records import WorkerMember
from server.errors import ApiError, InternalError, as_api_error
from server.usage.account import Account
from worker.common.tracing import Tracing, as_parent, mark_failed

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

log = logging.getLogger(__name__)

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.-]")
_NOT_TRACED: Final[AbstractContextManager[None]] = nullcontext()


class Trace:
    """A span, and those below it."""

    __slots__ = ("_part", "_tracer", "context", "span")

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self.span = span
        self._tracer = tracer
        self.context = as_parent(span)
        self._part: Span | None = None

    @contextmanager
    def child(self, name: str, part: str | None = None, **options: Any) -> Iterator[Trace]:
        """Record a child span, and in it a first span named `part`. `options` are OpenTelemetry's."""
        span = self._tracer.start_span(name, self.context, **options)
        child = Trace(self._tracer, span)
        child.begin_part(part)
        try:
            yield child
        except (GeneratorExit, asyncio.CancelledError):
            span.set_attribute("headstart.aborted", True)
            raise
        except Exception as error:
            mark_failed(span, type(error).__name__)
            raise
        finally:
            child.begin_part(None)
            span.end()

    def begin_part(self, name: str | None) -> None:
        """End the open part of this span, and begin the next, if any."""
        if self._part is not None:
            self._part.end()
        self._part = None if name is None else self._tracer.start_span(name, self.context)

    def first_token(self, num_cached_tokens: int | None) -> None:
        self.begin_part("stream")
        if num_cached_tokens is not None:
            self.span.set_attribute("headstart.cached_tokens", num_cached_tokens)


def carrier_of(context: Context) -> dict[str, str]:
    """Return `traceparent`, and `tracestate` where there is one."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, context)
    return carrier


@dataclass(slots=True, eq=False)
class RequestContext:
    """One request, from its first byte to its last."""

    client_id: str
    """The id from the client's `x-request-id`; empty: none."""
    started_s: float
    unique_id: str = field(default_factory=lambda: os.urandom(16).hex())
    """32 hexadecimal digits, unlike a client's id unique. The ids of the request and of its answer contain them."""
    route: str = "other"
    status: int = 0
    """0: the response never began."""
    error: str = ""
    """The code of the error that ended it; empty: none did."""
    sender: tuple[str, str] = "", ""
    """Tenant and key; empty: the request has shown no valid key."""
    limit_headers: Callable[[], list[tuple[bytes, bytes]]] = list
    """Returns the `x-ratelimit-*` headers of the request's key."""
    account: Account | None = None
    """The use of a request to a model's route."""
    removal_rule: str = ""
    """The name of the rule that removed an agent's line from the prompt; empty: none did."""
    repairs: tuple[str, ...] = ()
    """Changes to the messages, for what their template would refuse or lose."""
    ignored: list[str] = field(default_factory=list)
    """Parts of the request that are left out or change nothing, in characters that a header may have."""
    trace: Trace | None = None
    """None: not traced, or not sampled."""
    unsampled: Mapping[str, str] = field(default_factory=dict)
    """A trace context that is not sampled, for workers: without it they would begin their own trace."""

    def name_model(self, name: str) -> None:
        """Note the model in the account, as soon as it is known: a refusal may follow."""
        if self.account is not None:
            self.account.model = name

    def ignore(self, names: Iterable[str]) -> list[str]:
        """Note parts that are left out or change nothing. Return their names as a header has them."""
        safe = [_UNSAFE.sub("?", name[:64]) for name in names]
        self.ignored = [*dict.fromkeys([*self.ignored, *safe])]
        return safe

    @property
    def request_id(self) -> str:
        return self.client_id or f"req_{self.unique_id}"

    def begin_trace(self, tracing: Tracing, scope: Scope) -> None:
        path, names = scope["path"], (b"traceparent", b"tracestate")
        carrier = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in names}
        attributes = {"http.request.method": "POST", "http.route": path, "headstart.request_id": self.request_id}
        span = tracing.begin(f"POST {path}", carrier, attributes)
        if span.is_recording():
            self.trace = Trace(tracing.tracer, span)
        else:
            self.unsampled = carrier_of(as_parent(span))

    def fail(self, error: Exception) -> ApiError:
        """Record the error that ends the request, and return it as the client gets it. Log one without a name."""
        failure = as_api_error(error)
        if isinstance(failure, InternalError) and failure is not error:
            log.exception("%s: unexpected error", self.request_id)
        self.error = failure.code or failure.type
        if self.trace is not None and self.status:  # the answer has begun
            mark_failed(self.trace.span, type(failure).__name__)
        return failure

    def end(self, elapsed_s: float) -> None:
        """Close the account and the trace."""
        if self.account is not None:
            self.account.end(self.request_id, self.status, elapsed_s, self.error)
        if self.trace is None:
            return
        span = self.trace.span
        if self.status:
            span.set_attribute("http.response.status_code", self.status)
        if not self.status or self.status >= 500:
            mark_failed(span)
        if self.account is not None:
            span.set_attribute("gen_ai.usage.input_tokens", self.account.prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", self.account.output_tokens)
            span.set_attribute("headstart.cached_tokens", self.account.num_cached_tokens)
        span.end()


CURRENT: Final[ContextVar[RequestContext]] = ContextVar("current_request")
"""The request that the running task works for; `with_context` sets it."""


def add_ids(record: logging.LogRecord) -> bool:
    """Add the ids of the running task's request and trace to a log record."""
    context = CURRENT.get(None)
    if context is not None:
        record.request_id = context.request_id
        if context.trace is not None:
            record.trace_id = f"{context.trace.span.get_span_context().trace_id:032x}"
    return True


def trace_stage(name: str) -> AbstractContextManager[Trace | None]:
    """Trace a part of the running request's time."""
    context = CURRENT.get(None)
    return _NOT_TRACED if context is None or context.trace is None else context.trace.child(name)


def attempt_carrier(trace: Trace | None) -> Mapping[str, str]:
    """Return the trace context of the running request, for the worker of the attempt that `trace` records."""
    if trace is not None:
        return carrier_of(trace.context)
    context = CURRENT.get(None)
    return {} if context is None else context.unsampled


def trace_attempt(worker: WorkerMember, promised_tokens: int) -> AbstractContextManager[Trace | None]:
    """Trace the running request at one worker, until its stream ends or is closed."""
    context = CURRENT.get(None)
    if context is None or context.trace is None:
        return _NOT_TRACED
    from opentelemetry.trace import SpanKind

    attributes = {
        "gen_ai.request.model": worker.model,
        "headstart.worker": worker.worker_id,
        "headstart.promised_tokens": promised_tokens,
    }
    return context.trace.child("generate", "first token", kind=SpanKind.CLIENT, attributes=attributes)
