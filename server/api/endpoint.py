"""The ASGI endpoint of a generating route: body in, one JSON answer or a stream of events out.

read the body -> check -> prepare (template, tokens) -> run -> answer
                    all errors up to the first token are a status of their own
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from starlette.types import Receive, Scope, Send

from server.api.job import Job
from server.auth.authentication import lease_of
from server.auth.identity import Identity, identity_of
from server.errors import as_api_error
from server.http.stream import ClientConnection, ClientGoneError, KeepAlive, SseWriter, client_of
from server.pace import Pace
from server.request.answer import Answer, OpenAnswers
from server.request.backend import Backend
from server.request.request import Generation
from server.request_context import RequestContext, context_of
from server.tracing import RequestTrace
from worker.common.tracing import Tracing

log = logging.getLogger(__name__)

PART_BYTES: Final = 1 << 18
"""Of an unstreamed answer; a longer one goes out in chunks, as they are written."""

Prepare = Callable[[bytes, Identity], Awaitable[Job]]
"""A body's way to a job. Raises ApiError."""


@dataclass(frozen=True, slots=True, eq=False)
class EndpointServices:
    backend: Backend
    keep_alive: KeepAlive
    request_timeout_s: float
    tracing: Tracing | None = None
    open_answers: OpenAnswers = field(default_factory=OpenAnswers)


class GenerateEndpoint:
    """One route; an ASGI app by itself, without Starlette's request and response objects on the hot path."""

    def __init__(self, route: str, prepare: Prepare, services: EndpointServices) -> None:
        self._route = route
        self._prepare = prepare
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        context.route = self._route
        deadline_s = time.monotonic() + self._services.request_timeout_s
        if self._services.tracing is not None:
            context.trace = RequestTrace.begin(
                self._services.tracing, scope["path"], scope["headers"], context.request_id
            )
        body = await read_body(receive)
        job = await self._prepare(body, identity_of(scope))
        del body
        lease = lease_of(scope)
        num_prompt_tokens = sum(len(spec.prompt_ids) for spec in job.specs)
        if lease is not None:
            lease.take_tokens(num_prompt_tokens)
        generations, pace = [], Pace()
        for spec in job.specs:  # each hashes its prompt
            generations.append(Generation(spec, self._services.backend, deadline_s))
            await pace.rest()
        answer = Answer(generations, deadline_s)
        self._services.backend.metrics.prompt_tokens.inc(num_prompt_tokens)
        context.num_prompt_tokens = num_prompt_tokens
        self._services.open_answers.add(answer)
        try:
            if job.stream:
                await self._stream(job, answer, context, client_of(scope), send)
            else:
                await self._answer(job, answer, client_of(scope), send)
        finally:
            self._services.open_answers.discard(answer)
            num_tokens = sum(generation.num_output_tokens for generation in generations)
            self._services.backend.metrics.output_tokens.inc(num_tokens)
            if lease is not None:
                lease.add_tokens(num_tokens)
            context.num_output_tokens = num_tokens
            context.num_cached_tokens = sum(generation.num_cached_tokens or 0 for generation in generations)
            context.worker = ",".join(dict.fromkeys(g.worker.worker_id for g in generations if g.worker is not None))

    async def _answer(self, job: Job, answer: Answer, client: ClientConnection, send: Send) -> None:
        with answer.guard(client):
            choices = await answer.collect()
        headers = [(b"content-type", b"application/json"), *answer.headers()]
        parts: list[bytes] = []
        begun, num_bytes, pace = False, 0, Pace()
        for part in job.presenter.body(answer, choices):
            parts.append(part)
            num_bytes += len(part)
            if num_bytes > PART_BYTES:
                if not begun:
                    begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": b"".join(parts), "more_body": True})
                parts, num_bytes = [], 0
            await pace.rest()
        if not begun:
            headers.append((b"content-length", b"%d" % num_bytes))
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"".join(parts)})

    async def _stream(
        self, job: Job, answer: Answer, context: RequestContext, client: ClientConnection, send: Send
    ) -> None:
        writer = SseWriter(send, answer.headers)
        try:
            with answer.guard(client), self._services.keep_alive.keeping(writer):
                await self._relay(job, answer, context, writer)
            await writer.write(job.presenter.last_events(answer), more=False)
        except (ClientGoneError, asyncio.CancelledError):
            raise
        except Exception as error:
            if not writer.started:
                raise
            failure = as_api_error(error)
            if failure is not error:
                log.exception("%s: unexpected error in mid-stream", context.request_id)
            self._services.backend.metrics.dropped(failure.code or failure.type)
            if context.trace is not None:
                context.trace.fail(failure)
            await writer.write(job.presenter.error_event(failure), more=False)

    async def _relay(self, job: Job, answer: Answer, context: RequestContext, writer: SseWriter) -> None:
        metrics, first_s = self._services.backend.metrics, 0.0
        async with aclosing(answer.deltas()) as batches:
            async for batch in batches:
                events = job.presenter.events(answer, batch)
                if not isinstance(events, bytes):
                    events = await _joined(events)
                if not events:
                    continue
                if not answer.first.committed:
                    answer.commit()
                    first_s = time.perf_counter()
                    metrics.ttft_s.observe(first_s - context.started_s)
                await writer.write(events)
        num_gaps = sum(generation.num_output_tokens - len(generation.choices) for generation in answer.generations)
        if first_s and num_gaps > 0:
            metrics.token_s.observe((time.perf_counter() - first_s) / num_gaps)


async def _joined(parts: Iterable[bytes]) -> bytes:
    pace = Pace()
    joined = []
    for part in parts:
        joined.append(part)
        await pace.rest()
    return b"".join(joined)


async def read_body(receive: Receive) -> bytes:
    """The whole body. Raises ClientGoneError when it never comes to its end."""
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body", False):
        body: bytes = message.get("body", b"")
        return body
    parts = []
    while message["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)
        message = await receive()
    raise ClientGoneError
