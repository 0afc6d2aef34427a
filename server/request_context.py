"""The context of a request, for its handlers, the log and the traces."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from starlette.types import Scope

from cache.records import WorkerMember
from server.tracing import AttemptTrace, RequestTrace

if TYPE_CHECKING:
    from opentelemetry.trace import Span

CONTEXT: Final = "headstart.context"
_NOT_TRACED: Final[AbstractContextManager[None]] = nullcontext()


@dataclass(slots=True, eq=False)
class RequestContext:
    """One request, from its first byte to its last."""

    request_id: str
    started_s: float
    route: str = "other"
    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Further headers of the answer; the list's owner may still change it."""
    worker: str = ""
    """The worker that took the request; several, joined by commas, when it had several prompts."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    trace: RequestTrace | None = None
    """Its spans; None: not traced, or not sampled."""


_CURRENT: Final[ContextVar[RequestContext | None]] = ContextVar("current_request", default=None)
"""The request that the running task works for."""


def enter_context(scope: Scope, context: RequestContext) -> None:
    """Make `context` that of the scope and of the running task."""
    scope[CONTEXT] = context
    _CURRENT.set(context)


def context_of(scope: Scope) -> RequestContext:
    context: RequestContext = scope[CONTEXT]
    return context


def add_ids(record: logging.LogRecord) -> bool:
    """Add the ids of the running task's request and trace to a log record."""
    context = _CURRENT.get()
    if context is not None:
        record.request_id = context.request_id
        if context.trace is not None:
            record.trace_id = context.trace.trace_id
    return True


def stage(name: str) -> AbstractContextManager[Span | None]:
    """Trace a part of the running request's time."""
    context = _CURRENT.get()
    return _NOT_TRACED if context is None or context.trace is None else context.trace.stage(name)


def attempt(worker: WorkerMember, promised_tokens: int) -> AbstractContextManager[AttemptTrace | None]:
    """Trace the running request at one worker."""
    context = _CURRENT.get()
    return _NOT_TRACED if context is None or context.trace is None else context.trace.attempt(worker, promised_tokens)
