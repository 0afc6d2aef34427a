"""A worker that speaks the real wire protocol over real HTTP and does what a test asks for.

Its "model" continues a prompt with the ids of `reply`; a test changes `behave` to refuse, die, stall or misspeak.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer

from cache.hashing import Namespace
from cache.records import WorkerLoad, WorkerMember, WorkerState, signed
from tests.members import make_member
from tests.waiting import until as until
from worker.common.capabilities import EMBEDDINGS, TOKENS
from worker.common.proof import PROVE_PATH, gateway_token, new_instance, prove
from worker.wire import (
    End,
    Failed,
    Finished,
    Frame,
    GenerateRequest,
    PromptLogprobs,
    Started,
    TokenizerBundle,
    TokenLogprobs,
    Tokens,
    pack,
    unpack_request,
)

Script = Callable[[GenerateRequest], AsyncIterator[Frame]]


class Die(Exception):
    """Raised by a script: the connection breaks."""


class Refuse(Exception):
    """Raised by a script before its first frame: a status and a Failed frame."""

    def __init__(self, status: int, code: str, *, retryable: bool = True, retry_after_s: float | None = None) -> None:
        super().__init__(code)
        self.status = status
        self.failed = Failed(code, f"scripted {code}", retryable, retry_after_s)


def script_of(*frames: Frame, then: Exception | None = None) -> Script:
    """Send these frames to every request, and raise `then` once they can be read."""

    async def behave(request: GenerateRequest) -> AsyncIterator[Frame]:
        for frame in frames:
            yield frame
        if then is not None:
            await asyncio.sleep(0.02 if frames else 0.0)
            raise then

    return behave


@dataclass(eq=False)
class ScriptedWorker:
    bundle: TokenizerBundle
    worker_id: str = "w0"
    numerics: str = "cpu-float32"
    reply: list[int] = field(default_factory=list)
    pace_s: float = 0.0
    num_cached_tokens: int = 0
    behave: Script | None = None
    received: list[GenerateRequest] = field(default_factory=list)
    aborted: list[object] = field(default_factory=list)
    num_running: int = 0
    url: str = ""
    hung: bool = False
    num_probed: int = 0
    namespace: str = ""
    embedding_size: int = 0
    refuses_purge: Failed | None = None

    def member(self) -> WorkerMember:
        b = self.bundle
        space = Namespace(model=b.model, revision=b.revision, tokenizer=b.fingerprint, block_size=b.block_size)
        return make_member(
            self.worker_id,
            f"epoch-{self.worker_id}",
            url=self.url,
            model=b.model,
            namespace=self.namespace or space.fingerprint,
            numerics=self.numerics,
            block_size=b.block_size,
            max_model_len=b.max_model_len,
            embedding_size=self.embedding_size,
            capabilities=(EMBEDDINGS if self.embedding_size else TOKENS,),
        )

    async def answer(self, request: GenerateRequest) -> AsyncIterator[Frame]:
        """Every choice gets `reply`, one token a frame, choices in turn, honouring max_tokens and resumption."""
        yield Started(self.num_cached_tokens)
        if request.sampling.prompt_logprobs is not None:
            yield PromptLogprobs((None, *(self._logprobs(id_, 1) for id_ in request.prompt_ids[1:])))
        limit = request.sampling.max_tokens
        done = {choice.index: len(choice.output_ids) for choice in request.choices}
        for position in range(min(done.values()), min(limit, len(self.reply))):
            for choice in request.choices:
                if done[choice.index] <= position:
                    if self.pace_s:
                        await asyncio.sleep(self.pace_s)
                    yield self.token(request, choice.index, self.reply[position])
        for choice in request.choices:
            if limit > len(self.reply):
                yield self.token(request, choice.index, self.bundle.eos_token_ids[0])
                yield Finished(choice.index, "stop", self.bundle.eos_token_ids[0])
            else:
                yield Finished(choice.index, "length")
        yield End(0.0, 0.0, 0.0)

    def token(self, request: GenerateRequest, choice: int, token_id: int) -> Tokens:
        if request.sampling.logprobs is None:
            return Tokens(choice, (token_id,))
        return Tokens(choice, (token_id,), (self._logprobs(token_id, request.sampling.logprobs),))

    def _logprobs(self, token_id: int, num_top: int) -> TokenLogprobs:
        return TokenLogprobs(-0.5, tuple((token_id + i, -0.5 - i) for i in range(num_top)))

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/generate", self._generate, methods=["POST"]),
                Route("/abort", self._abort, methods=["POST"]),
                Route("/health/live", self._live),
                Route("/state", self._state),
                Route("/bundle", self._bundle),
                Route("/purge", self._purge, methods=["POST"]),
            ]
        )

    def holds(self, go: asyncio.Event, num_frames: int = 0) -> Script:
        """Answer as usual, but wait for `go` behind that many frames."""

        async def behave(request: GenerateRequest) -> AsyncIterator[Frame]:
            num_sent = 0
            async for frame in self.answer(request):
                if num_sent == num_frames:
                    await go.wait()
                yield frame
                num_sent += 1

        return behave

    async def _generate(self, http: Request) -> Response:
        request = unpack_request(await http.body())
        self.received.append(request)
        frames = (self.behave or self.answer)(request)
        try:
            first = await anext(frames)
        except Refuse as refusal:
            return Response(pack(refusal.failed), status_code=refusal.status)
        return StreamingResponse(self._relay(request, first, frames))

    async def _relay(
        self, request: GenerateRequest, first: Frame, frames: AsyncIterator[Frame]
    ) -> AsyncIterator[bytes]:
        self.num_running += 1
        complete = False
        try:
            yield pack(first)
            async for frame in frames:
                yield pack(frame)
            complete = True
        finally:
            self.num_running -= 1
            if not complete:
                self.aborted.append(request.request_id)

    async def _abort(self, http: Request) -> Response:
        message = msgspec.msgpack.decode(await http.body())
        self.aborted.append((message["request_id"], message["choice"]))
        return Response(b"")

    async def _live(self, http: Request) -> Response:
        self.num_probed += 1
        if self.hung:
            await asyncio.Event().wait()
        return Response(b"{}")

    async def _state(self, http: Request) -> Response:
        return Response(pack(WorkerState(self.member(), WorkerLoad())))

    async def _purge(self, http: Request) -> Response:
        if self.refuses_purge is not None:
            return Response(pack(self.refuses_purge), status_code=400)
        return Response(b'{"epoch": "epoch-after-purge"}')

    async def _bundle(self, http: Request) -> Response:
        return Response(pack(self.bundle))


class Says:
    """Workers whose answer is a given text."""

    def __init__(self, bundle: TokenizerBundle, tokenizer: Tokenizer) -> None:
        self._bundle = bundle
        self._tokenizer = tokenizer

    def __call__(self, text: str, **bundle: Any) -> ScriptedWorker:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ScriptedWorker(replace(self._bundle, **bundle), reply=ids)

    def prompt(self, worker: ScriptedWorker) -> str:
        text: str = self._tokenizer.decode(list(worker.received[-1].prompt_ids), skip_special_tokens=False)
        return text


@dataclass(eq=False)
class ProvenWorker(ScriptedWorker):
    """A scripted worker that has the cluster secret."""

    secret: bytes = b""

    def member(self) -> WorkerMember:
        return signed(self.secret, super().member())

    def app(self) -> Starlette:
        app, instance = super().app(), new_instance()

        async def answer(request: Request) -> Response:
            token = gateway_token(self.secret)
            return Response(pack(prove(token, await request.body(), self.url, instance)))

        app.router.routes.append(Route(PROVE_PATH, answer, methods=["POST"]))
        return app


class QuietServer(uvicorn.Server):
    """Does not handle the signals of the test process, and ends at once when it is stopped."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopped = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.stopped.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        with suppress(TimeoutError):
            await until(lambda: not (self.server_state.connections or self.server_state.tasks), 0.1)

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


@asynccontextmanager
async def listening(app: Any, **options: Any) -> AsyncIterator[str]:
    """Serve an ASGI app on a free loopback port; yields its base URL."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan="off", **options)
    server = QuietServer(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        if task.done():
            await task
        await asyncio.sleep(0.001)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stopped.set()
        await task
