"""The fake engine's APIs of text, as vLLM has them: chats and completions, and the rendering of their prompts."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import jinja2
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

if TYPE_CHECKING:
    from tests.fake_engine.server import FakeEngine

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
_SAMPLING = ("temperature", "ignore_eos", "min_tokens", "stop_token_ids", "allowed_token_ids", "structured_outputs")


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class TextApis:
    """Answers of one fake engine."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.args = engine.args

    def routes(self) -> list[Route]:
        both = (CHAT, COMPLETIONS)
        return [
            *[Route(path, self.answer, methods=["POST"]) for path in both],
            *[Route(f"{path}/render", self.render, methods=["POST"]) for path in both],
        ]

    def _prompt(self, path: str, body: dict[str, Any]) -> list[int]:
        """Return the ids of a body's prompt. Raises Refused."""
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids") or body.get("prompt")
        if path == CHAT:
            if self.args.refuses_text or "messages" not in body:
                raise Refused(400, "messages: this engine takes none")
            if not given:
                path_of_config = self.args.folder / "tokenizer_config.json"
                if not path_of_config.exists():
                    raise Refused(400, "this model has no chat template")
                config = json.loads(path_of_config.read_text())
                template = jinja2.Template(self.args.chat_template or config["chat_template"])
                try:
                    given = template.render(**config, messages=body["messages"], add_generation_prompt=True)
                except (TypeError, jinja2.TemplateError) as error:
                    raise Refused(400, str(error)) from error
        if given is None:
            raise Refused(400, "prompt: Field required")
        if isinstance(given, str):
            given = self.args.tokenizer.encode(given, add_special_tokens=False).ids
        if len(given) > self.args.max_model_len:
            raise Refused(400, "This model's maximum context length is exceeded")
        return list(given)

    def _length(self, body: dict[str, Any], num_prompt_tokens: int) -> int:
        asked = body.get("max_completion_tokens") or body.get("max_tokens")
        return int(asked or self.args.max_model_len - num_prompt_tokens)

    async def render(self, request: Request) -> Response:
        path, body = request.url.path.removesuffix("/render"), await request.json()
        if (refused := self.engine.refused(request)) is not None:
            return refused
        try:
            ids = self._prompt(path, body)
        except Refused as error:
            return JSONResponse({"error": {"message": str(error)}}, error.status)
        prompt = {"token_ids": ids, "sampling_params": {"max_tokens": self._length(body, len(ids))}}
        return JSONResponse(prompt if path == CHAT else [prompt])

    async def answer(self, request: Request) -> Response:
        body, path = await request.json(), request.url.path
        if (refused := self.engine.refused(request)) is not None:
            return refused
        model, names = body.get("model"), (self.args.model, *self.args.alias)
        if model not in (None, *names, *self.args.lora):
            return JSONResponse({"error": {"message": f"The model `{model}` does not exist."}}, 404)
        try:
            ids = self._prompt(path, body)
        except Refused as error:
            return JSONResponse({"error": {"message": str(error)}}, error.status)
        rank = self.engine.ranks[int(request.headers.get("x-data-parallel-rank", "0"))]
        salt = "" if self.args.ignore_salt else body.get("cache_salt") or ""
        params = {name: body[name] for name in _SAMPLING if name in body}
        params["max_tokens"] = self._length(body, len(ids))
        parts: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()

        async def run(index: int) -> None:
            lora = model if model in self.args.lora else None
            stream = rank.generate(ids, params | {"seed": f"{body.get('seed')} {index}"}, salt, lora)
            most = max(self.args.stream_interval, body.get("stream_interval") or 1) if body.get("stream") else 1
            held, room = list[int](), 1  # the first token comes by itself
            async with contextlib.aclosing(stream):
                async for part in stream:
                    if isinstance(part, int):
                        parts.put_nowait((index, part))
                        continue
                    token_ids, reason, stop = part
                    held += token_ids
                    if len(held) >= room or reason is not None:
                        parts.put_nowait((index, (held, reason, stop)))
                        held, room = [], most

        async def chunks() -> AsyncIterator[dict[str, Any]]:
            """Yield each token as a choice of a stream, and the usage at last."""
            left, num_cached, num_output = body.get("n") or 1, 0, 0
            tasks = [asyncio.create_task(run(index)) for index in range(left)]
            try:
                while left:
                    index, part = await parts.get()
                    if isinstance(part, int):
                        left, num_cached = left - 1, max(num_cached, part)
                        continue
                    token_ids, reason, stop = part
                    num_output += len(token_ids)
                    text = self.args.tokenizer.decode(token_ids)
                    shown = {"delta": {"content": text}} if path == CHAT else {"text": text}
                    choice = {"index": index, **shown, "token_ids": token_ids, "finish_reason": reason}
                    yield {"choices": [choice | {"stop_reason": stop}]}
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            usage = {"prompt_tokens": len(ids), "completion_tokens": num_output}
            details = {"prompt_tokens_details": {"cached_tokens": num_cached}}
            yield {"choices": [], "usage": usage | {"total_tokens": len(ids) + num_output} | details}

        head = {"id": body.get("request_id", "x"), "created": 1, "model": model or self.args.model}
        if body.get("stream"):
            return StreamingResponse(self._events(head, chunks()), media_type="text/event-stream")
        return JSONResponse(head | await self._whole(path, body, chunks()))

    async def _events(self, head: dict[str, Any], chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
        async with contextlib.aclosing(chunks):  # type: ignore[type-var]
            async for chunk in chunks:
                yield b"data: " + json.dumps(head | chunk).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def _whole(self, path: str, body: dict[str, Any], chunks: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
        ids: dict[int, list[int]] = {}
        ends: dict[int, dict[str, Any]] = {}
        usage: dict[str, Any] = {}
        async with contextlib.aclosing(chunks):  # type: ignore[type-var]
            async for chunk in chunks:
                usage = chunk.get("usage", usage)
                for choice in chunk["choices"]:
                    ids.setdefault(choice["index"], []).extend(choice["token_ids"])
                    ends[choice["index"]] = {name: choice[name] for name in ("finish_reason", "stop_reason")}
        choices = []
        for index, token_ids in sorted(ids.items()):
            text = self.args.tokenizer.decode(token_ids)
            shown = {"message": {"role": "assistant", "content": text}} if path == CHAT else {"text": text}
            tokens = {"token_ids": token_ids} if body.get("return_token_ids") else {}
            choices.append({"index": index, **shown, **ends[index], **tokens})
        return {"choices": choices, "usage": usage}
