"""A scripted adapter whose engine writes the text, and a gateway in front of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tokenizers import Tokenizer

from cache.records import WorkerMember
from tests.server.gateway_app import RunningGateway, gateway
from tests.server.scripted_worker import Die, ScriptedWorker
from tests.waiting import until
from worker.common.capabilities import TOKENS
from worker.wire import (
    End,
    EngineCall,
    EngineText,
    Failed,
    Finished,
    Frame,
    GenerateRequest,
    Rendered,
    Started,
    Tokens,
    pack,
    unpack,
)

APIS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
WORDS = ("The", " capital", " is", " Paris", ".")
USAGE = {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9}


def chunk(delta: dict[str, Any] | None, ids: list[int] | None = None, **fields: Any) -> bytes:
    """One event of vLLM's stream of a chat, or of a completion that `is_text`."""
    choices = []
    if delta is not None:
        text = {"text" if name == "content" else name: value for name, value in delta.items()}
        output = text if fields.pop("is_text", False) else {"delta": delta}
        choice = {"index": 0, **output, "logprobs": None, "finish_reason": fields.pop("finish_reason", None)}
        choices = [choice | ({} if ids is None else {"token_ids": ids})]
    head = {"id": "chatcmpl-engine", "object": "chat.completion.chunk", "created": 1, "model": "engine-name"}
    return json.dumps(head | {"choices": choices} | fields).encode()


@dataclass(eq=False)
class EngineWorker(ScriptedWorker):
    """An adapter whose engine writes `parts`: each a delta with one token."""

    parts: list[dict[str, Any]] = field(default_factory=lambda: [{"content": word} for word in WORDS])
    dies_after: int | None = None
    gives_ids: bool = True
    rendered: list[dict[str, Any]] = field(default_factory=list)
    refuses_render: Failed | None = None
    tokenizer: Tokenizer | None = None
    message: dict[str, Any] | None = None
    """The whole answer, instead of the joined parts."""
    logprobs: dict[str, Any] | None = None
    refuses_roles: tuple[str, ...] = ()
    silent: bool = False
    """It answers neither polls nor calls."""
    apis: tuple[str, ...] | None = None
    """The engine's; by default all. Without any, the worker is one with Headstart's engine."""
    max_model_len: int = 0
    """0: that of the bundle."""

    def member(self) -> WorkerMember:
        member = super().member()
        longest = self.max_model_len or member.max_model_len
        capabilities = (APIS if self.apis is None else self.apis) or (TOKENS,)
        return replace(member, capabilities=capabilities, max_model_len=longest)

    def app(self) -> Starlette:
        app = super().app()
        app.router.routes.append(Route("/render", self._render, methods=["POST"]))
        return app

    async def _state(self, http: Request) -> Response:
        return Response(status_code=500) if self.silent else await super()._state(http)

    async def _render(self, http: Request) -> Response:
        if self.silent:
            return Response(pack(Failed("not_ready", "silent", retryable=True)), status_code=503)
        call = unpack(await http.body(), EngineCall)
        self.rendered.append(json.loads(call.body))
        found = self.refuses_render or self.render(call.path, self.rendered[-1])
        return Response(pack(found), status_code=400 if isinstance(found, Failed) else 200)

    def render(self, path: str, body: dict[str, Any]) -> Rendered | Failed:
        """Return the engine's prompt of a body."""
        assert self.tokenizer is not None
        if any(message["role"] in self.refuses_roles for message in body.get("messages", ())):
            return Failed("invalid_request", "a role", retryable=False)
        texts = [str(message["content"]) for message in body.get("messages", ())]
        ids = self.tokenizer.encode("<|im_start|>" + "\n".join(texts) + "<|im_end|>").ids
        return Rendered((tuple(ids),), (100,))

    async def answer(self, request: GenerateRequest) -> AsyncIterator[Frame]:
        if request.call is None:  # the gateway has rendered the prompt
            async for frame in super().answer(request):
                yield frame
            return
        yield Started(self.num_cached_tokens)
        begun = len(request.choices[0].output_ids)
        if not request.call.streams:
            if self.dies_after is not None:
                raise Die
            message = {"role": "assistant", "content": "".join(part.get("content", "") for part in self.parts)}
            message = self.message or message
            choice = {"index": 0, "message": message, "token_ids": [1, 2], "finish_reason": "stop"}
            choice["logprobs"] = self.logprobs
            body = {"id": "e", "created": 1, "model": "e", "choices": [choice], "prompt_token_ids": [1], "usage": USAGE}
            yield Tokens(0, (1, 2))
            yield EngineText(json.dumps(body).encode())
            yield Finished(0, "stop")
            yield End(0.0, 0.0, 0.0)
            return
        is_text = request.call.path == "/v1/completions"
        if not is_text:
            yield EngineText(chunk({"role": "assistant", "content": ""}, prompt_token_ids=[1, 2, 3, 4]))
        for number, part in enumerate(self.parts[begun:], begun):
            if number == self.dies_after:
                await asyncio.sleep(0.02)
                raise Die
            if self.gives_ids:
                yield Tokens(0, (10 + number,))
            reason = "stop" if number == len(self.parts) - 1 else None
            yield EngineText(chunk(part, [10 + number], finish_reason=reason, is_text=is_text))
        if "stream_options" in json.loads(request.call.body):
            usage = USAGE | {"prompt_tokens": 4 + begun, "completion_tokens": 5 - begun}
            yield EngineText(chunk(None, usage=usage, system_fingerprint="fp"))
        yield Finished(0, "stop")
        yield End(0.0, 0.0, 0.0)


@asynccontextmanager
async def engine_gateway(*workers: EngineWorker, **options: Any) -> AsyncIterator[RunningGateway]:
    async with gateway(*workers, **options) as target:
        await until(lambda: any(model.facts.engine_paths for _, model in target.models.names()))
        yield target


def text_of(found: list[Any]) -> str:
    choices = [choice for event in found if event != "[DONE]" for choice in event["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
