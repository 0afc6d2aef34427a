"""The ASGI endpoint of a generating route: body in, one JSON response or a stream of events out.

    read the body -> prepare (decode, check, template, tokens) -> generate -> format

An error before the first byte has its own HTTP status; later it is the last event.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Final, Protocol

from msgspec import Struct
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from server.api.formatting import ResponseFormatter
from server.api.prompts.ignored_tools import IgnoredTools
from server.auth.identity import Identity, identity_of
from server.config import GatewayConfig
from server.errors import NotFoundError, RevisionGoneError, ShuttingDownError, UnavailableError, forget
from server.event_loop import sliced
from server.http.stream import CancelOnDisconnect, SseWriter, client_of
from server.models.registry import Models
from server.models.served_model import ServedModel
from server.request.choice import ChoiceDelta, GenerationSpec
from server.request.hints import read_hints
from server.request.request import Deliver, Generation
from server.request.response import ResponseStream
from server.request.services import RequestServices
from server.request_context import CURRENT
from server.schema.decoding import require_json
from server.usage.account import Account
from worker.common.http_protocol import AnswerCycle
from worker.common.tracing import Tracing

PART_BYTES: Final = 1 << 18
"""The chunk size of a long unstreamed response, which goes out as it is written."""


class EngineText(Protocol):
    """`server.api.engine.text.EngineTexts`."""

    async def prepare(
        self, path: str, body: bytes, identity: Identity, endpoint: GenerateEndpoint, *, counts: bool = False
    ) -> PreparedRequest | None: ...

    async def has_other_template(self, model: ServedModel) -> bool: ...


@dataclass(frozen=True, slots=True, eq=False)
class EndpointServices:
    config: GatewayConfig
    models: Models
    requests: RequestServices
    ignored_tools: IgnoredTools
    tracing: Tracing | None
    engine_text: EngineText
    open_responses: set[ResponseStream] = field(default_factory=set)
    """The responses being written now."""
    guards: set[CancelOnDisconnect] = field(default_factory=set)
    """Those of the requests being prepared or answered now."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by `shutdown`: a request whose body was still being sent does not begin."""

    @property
    def num_streamed_tokens(self) -> int:
        return sum(response.num_output_tokens for response in self.open_responses)

    @contextmanager
    def guarded(self, client: AnswerCycle, deadline_s: float) -> Iterator[None]:
        """Cancel a block at the deadline, at shutdown, and when the client disconnects."""
        guard = CancelOnDisconnect(client, max(0.0, deadline_s - time.monotonic()))
        self.guards.add(guard)
        try:
            with guard:
                yield
        finally:
            self.guards.discard(guard)

    def shutdown(self) -> None:
        """End every open response, and every preparation. No other response begins."""
        self.stopping.set()
        for guard in self.guards:
            guard.end(ShuttingDownError)


class PreparedRequest(Struct, frozen=True, eq=False):
    """A checked, tokenised request."""

    specs: tuple[GenerationSpec, ...]
    """One per prompt."""
    formatter: ResponseFormatter
    stream: bool


@dataclass(slots=True, eq=False)
class Answer:
    """The generations of one request, and what writes them. Both are replaced when their revision goes too early."""

    formatter: ResponseFormatter
    response: ResponseStream
    prepare: Callable[[], Awaitable[PreparedRequest]] | None
    """Prepares the request again, from its body; None: output has been sent to the client."""
    begin: Callable[[PreparedRequest], Awaitable[list[Generation]]]
    deadline_s: float
    """On the monotonic clock."""

    async def run(self, deliver: Deliver | None = None) -> None:
        """Run the generations to their end. Raises ApiError."""
        while True:
            try:
                return await self.response.run(deliver)
            except RevisionGoneError:
                if self.prepare is None:
                    raise
                again = await self.prepare()
                self.formatter, self.response.generations = again.formatter, await self.begin(again)
                del again

    def commit(self) -> None:
        """Record that output has been sent to the client: the request is not prepared again."""
        self.response.commit()
        self.prepare = None


class GenerateEndpoint(ABC):
    """One generating route: an ASGI app by itself, without Starlette's request and response objects."""

    route: ClassVar[str]
    prefix: ClassVar[str]
    """The beginning of its answers' ids."""

    def __init__(self, services: EndpointServices) -> None:
        self._services = services
        self._models = services.models
        self._metrics = services.requests.metrics

    @abstractmethod
    async def prepare(self, body: bytes, identity: Identity) -> PreparedRequest:
        """Decode, check and tokenise a body. Raises ApiError."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        require_json(scope["headers"])
        services, context, identity = self._services, CURRENT.get(), identity_of(scope)
        usage = identity.usage
        context.route = self.route
        context.account = account = Account(tenant=identity.tenant, key=identity.key_name, route=self.route)
        deadline_s = time.monotonic() + services.config.request_timeout_s
        if services.tracing is not None:
            context.begin_trace(services.tracing, scope)
        hints = read_hints(scope["headers"])
        prepare = partial(self.prepared, scope["path"], await Request(scope, receive).body(), identity)
        with services.guarded(client_of(scope), deadline_s):
            request = await prepare()
        num_prompt_tokens = sum([len(spec.prompt_ids) for spec in request.specs])

        async def begin(request: PreparedRequest) -> list[Generation]:
            """Make the generations of a request, which may be prepared again."""
            return [Generation(spec, services.requests, deadline_s, hints) async for spec in sliced(request.specs)]

        response = ResponseStream(await begin(request))
        if services.stopping.is_set():
            raise ShuttingDownError
        if usage is not None:
            usage.take_tokens(num_prompt_tokens)
        answer = Answer(request.formatter, response, prepare, begin, deadline_s)
        is_streamed = request.stream
        del request, prepare  # the body
        services.open_responses.add(response)
        try:
            if is_streamed:
                await self._stream(answer, account, scope, send)
            else:
                await self._respond(answer, scope, send)
        finally:
            services.open_responses.discard(response)
            shows_output = answer.formatter.shows_output
            response.close(account, self._metrics, time.perf_counter() - context.started_s, shows_output=shows_output)
            if usage is not None:
                usage.add_tokens(account.prompt_tokens - num_prompt_tokens + response.num_output_tokens)

    async def prepared(self, path: str, body: bytes, identity: Identity) -> PreparedRequest:
        """Prepare a request, also for an engine's text, for the revision that serves now. Raises ApiError."""
        while True:
            with suppress(RevisionGoneError):  # gone while its engine renders the prompt
                CURRENT.get().ignored.clear()
                request = await self._services.engine_text.prepare(path, body, identity, self)
                return await self.prepare(body, identity) if request is None else request

    def _model(self, name: str, identity: Identity) -> ServedModel:
        """Return the model, which generates text.

        Raises NotFoundError, ForbiddenError, InvalidRequestError, or UnavailableError while no model is known at all.
        """
        model = self._known_model(name, identity)
        self._models.check_generates(name, model)
        return model

    def _known_model(self, name: str, identity: Identity) -> ServedModel:
        try:
            model = self._models.readable(name, identity)
        except NotFoundError:
            if not self._models.names():
                raise UnavailableError("No worker is ready yet.", retry_after_s=2.0) from None
            raise
        CURRENT.get().name_model(model.name)
        return model

    async def _respond(self, answer: Answer, scope: Scope, send: Send) -> None:
        response = answer.response
        with self._services.guarded(client_of(scope), answer.deadline_s):
            await answer.run()
            choices = response.take_deltas()
        headers = [(b"content-type", b"application/json"), *response.headers()]
        parts, num_bytes, begun = list[bytes](), 0, False
        async for part in sliced(answer.formatter.body(response, choices)):
            if num_bytes > PART_BYTES:
                if not begun:
                    begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": b"".join(parts), "more_body": True})
                parts, num_bytes = [], 0
            parts.append(part)
            num_bytes += len(part)
        if not begun:
            headers.append((b"content-length", b"%d" % num_bytes))
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"".join(parts)})

    async def _stream(self, answer: Answer, account: Account, scope: Scope, send: Send) -> None:
        services, context, client, response = self._services, CURRENT.get(), client_of(scope), answer.response
        writer = SseWriter(send, response.headers, answer.formatter.ping, client.write)
        client.on_probe = writer.probe
        first_s = 0.0

        async def events_of(deltas: list[ChoiceDelta]) -> bytes:
            nonlocal first_s
            events = answer.formatter.events(response, deltas)
            if not isinstance(events, bytes):
                events = b"".join([part async for part in sliced(events)])
            if events and not first_s:
                answer.commit()
                first_s = time.perf_counter()
                account.first_token_s = first_s - context.started_s
                self._metrics.ttft_s.observe(account.first_token_s, response.model)
            return events

        async def deliver(deltas: list[ChoiceDelta]) -> None:
            if events := await events_of(deltas):
                await writer.write(events)

        try:
            with services.guarded(client, answer.deadline_s), writer.kept_alive(services.config.ping_s):
                await answer.run(deliver)
                last = await events_of(deltas) if (deltas := response.take_deltas()) else b""
            num_choices = sum([len(each.choices) for each in response.generations])
            num_gaps = response.num_output_tokens - num_choices
            if first_s and num_gaps > 0:
                gap_s = (time.perf_counter() - first_s) * num_choices / num_gaps  # choices run side by side
                self._metrics.count_gaps(response.model, gap_s, num_gaps)
            await writer.write(last + answer.formatter.last_events(response), more=False)
        except Exception as error:
            if isinstance(error, ClientDisconnect) or not writer.started:
                raise
            failure = context.fail(error)
            forget(error)
            await writer.write(answer.formatter.error_event(failure), more=False)
