"""A fake SGLang: the parts of its HTTP API that the adapter calls, over a radix cache and a model that only hashes.

python -m tests.fake_engine.sglang FOLDER --port 8000 --events tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558 ...
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import jinja2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.fake_engine.events import Events
from tests.fake_engine.options import options, parsed
from tests.fake_engine.radix import RadixCache, Space, as_array, pack


class FakeSglang:
    """The HTTP server, with one scheduler."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.cache = RadixCache(args.page_size, args.eagle)
        self.startup_s = time.time()
        self.num_running = self.num_cached_tokens = self.num_prompt_tokens = 0
        self.lora_ids = {name: secrets.token_hex(16) for name in args.lora}
        self.locked: list[list[int]] = []
        """The pages of running requests."""
        self.bodies: list[dict[str, Any]] = []
        self.events = Events(args.events, args.replay, "", 0) if args.events else None
        self.app = Starlette(
            routes=[
                Route("/health", self.health),
                Route("/server_info" if args.has_short_paths else "/get_server_info", self.server_info),
                Route("/model_info" if args.has_short_paths else "/get_model_info", self.model_info),
                Route("/v1/models", self.models),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/metrics", self.metrics),
                Route("/flush_cache", self.flush, methods=["POST"]),
                Route("/generate", self.generate, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/fake/loras", self.loras, methods=["POST"]),
            ]
        )

    def close(self) -> None:
        if self.events is not None:
            self.events.close()

    def publish(self) -> None:
        """End a step of the scheduler."""
        events = self.cache.take_events()
        if self.events is not None and events:
            sent: list[Any] = [as_array(event) for event in events] if self.args.layout == "arrays" else list(events)
            self.events.send(pack(time.time(), sent, 0))

    async def health(self, request: Request) -> Response:
        return Response()

    async def server_info(self, request: Request) -> Response:
        config = {"publisher": "zmq", "endpoint": self.args.events, "replay_endpoint": self.args.replay, "topic": ""}
        return JSONResponse(
            {
                "version": self.args.version,
                "page_size": self.args.page_size,
                "max_total_num_tokens": self.args.num_pages * self.args.page_size,
                "dtype": "bfloat16",
                "disable_radix_cache": False,
                "uses_mamba_radix_cache": False,
                "speculative_algorithm": "EAGLE" if self.args.eagle else None,
                "dp_size": 1,
                "random_seed": 7,
                "startup_time": {"total": self.startup_s},
                "kv_events_config": json.dumps(config) if self.args.events else None,
                "internal_states": [{"memory_usage": {"token_capacity_swa": 4096 if self.args.windows else None}}],
            }
        )

    async def model_info(self, request: Request) -> Response:
        return JSONResponse({"model_path": str(self.args.folder), "tokenizer_path": str(self.args.folder)})

    async def models(self, request: Request) -> Response:
        base = {"id": self.args.model, "root": self.args.model, "max_model_len": self.args.max_model_len}
        loras = [{"id": name, "root": name, "parent": self.args.model} for name in self.lora_ids]
        return JSONResponse({"object": "list", "data": [base, *loras]})

    async def tokenize(self, request: Request) -> Response:
        body = await request.json()
        text, add_special = body.get("prompt"), body.get("add_special_tokens", True)
        if text is None:
            add_special = False
            config = json.loads((self.args.folder / "tokenizer_config.json").read_text())
            template = jinja2.Template(config["chat_template"])
            try:
                text = template.render(**config, messages=body["messages"], add_generation_prompt=True)
            except (TypeError, jinja2.TemplateError) as error:
                return JSONResponse({"object": "error", "message": str(error), "code": 400}, 400)
        ids = self.args.tokenizer.encode(text, add_special_tokens=add_special).ids
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self.args.max_model_len})

    async def metrics(self, request: Request) -> Response:
        values = {
            "sglang:num_running_reqs": self.num_running,
            "sglang:num_queue_reqs": 0,
            "sglang:token_usage": 0.0,
            "sglang:prompt_tokens_total": self.num_prompt_tokens,
            "fake:cached_tokens_total": self.num_cached_tokens,
        }
        return PlainTextResponse("".join(f"{name} {float(value)}\n" for name, value in values.items()))

    async def flush(self, request: Request) -> Response:
        if self.num_running:
            return PlainTextResponse("requests run", 400)
        self.cache.reset()
        self.publish()
        return Response()

    async def loras(self, request: Request) -> Response:
        """Load these adapters, each under a new id."""
        self.lora_ids = {name: secrets.token_hex(16) for name in (await request.json())["loras"]}
        return Response()

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        lora = body.get("lora_path")
        if lora is not None and lora not in self.lora_ids:
            return JSONResponse({"error": {"message": f"no LoRA adapter {lora}"}}, 400)
        if len(body["input_ids"]) > self.args.max_model_len:
            message = "The input is longer than the model's context length."
            return JSONResponse({"error": {"message": message}}, 400)
        params = body["sampling_params"]
        stream = self.run(body, lora, params["max_new_tokens"], bool(params.get("ignore_eos")))
        num_cached = 0
        async with contextlib.aclosing(stream):
            async for _, found, _ in stream:
                num_cached = found
        return JSONResponse({"meta_info": {"cached_tokens": num_cached}})

    async def chat(self, request: Request) -> Response:
        """Answer by ready ids. SGLang gives no token ids in streams."""
        body = await request.json()
        self.bodies.append(body)
        if "messages" not in body:
            return JSONResponse({"object": "error", "message": "messages: Field required", "code": 400}, 400)
        stream = self.run(body, body.get("lora_path"), body.get("max_completion_tokens") or body["max_tokens"], False)
        head = {"id": body["rid"], "object": "chat.completion", "created": 1, "model": body.get("model", "default")}
        output_ids: list[int] = []
        num_cached = 0

        def usage() -> dict[str, Any]:
            num, done = len(body["input_ids"]), len(output_ids)
            details = {"cached_tokens": num_cached}
            return {"prompt_tokens": num, "completion_tokens": done, "prompt_tokens_details": details}

        async def events() -> AsyncIterator[bytes]:
            nonlocal num_cached
            async with contextlib.aclosing(stream):
                async for token_id, found, reason in stream:
                    num_cached = found
                    output_ids.append(token_id)
                    delta = {"role": "assistant", "content": self.args.tokenizer.decode([token_id])}
                    done = None if reason is None else reason["type"]
                    chunk = {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": done}]}
                    yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
            yield b"data: " + json.dumps({**head, "choices": [], "usage": usage()}).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"

        if body.get("stream"):
            return StreamingResponse(events(), media_type="text/event-stream")
        done: str | None = None
        async for token_id, found, reason in stream:
            num_cached = found
            output_ids.append(token_id)
            done = None if reason is None else reason["type"]
        message = {"role": "assistant", "content": self.args.tokenizer.decode(output_ids)}
        choice = {"index": 0, "message": message, "finish_reason": done}
        choice |= {"token_ids": output_ids} if body.get("return_token_ids") else {}
        return JSONResponse({**head, "choices": [choice], "usage": usage()})

    async def run(
        self, body: dict[str, Any], lora: str | None, max_tokens: int, ignores_eos: bool
    ) -> AsyncIterator[tuple[int, int, dict[str, Any] | None]]:
        """Yield each token with the number of cached tokens and the finish reason."""
        token_ids = list(body["input_ids"])
        salt = body.get("extra_key" if self.args.layout == "arrays" else "cache_salt")
        space = Space(salt, lora, None if lora is None else self.lora_ids[lora])
        num_cached = self.cache.num_found(token_ids, space)
        self.num_running += 1
        self.num_cached_tokens += num_cached
        self.num_prompt_tokens += len(token_ids)
        locked = self.cache.names(token_ids, space)
        self.locked.append(locked)
        try:
            await asyncio.sleep(self.args.token_s)
            self.keep(token_ids, space, body.get("session_id"))
            for number in range(max_tokens):
                await asyncio.sleep(self.args.token_s)
                token_id = 1000 + hash(tuple(token_ids[-8:])) % 20_000
                token_ids.append(token_id)
                reason = {"type": "length", "length": max_tokens} if number + 1 == max_tokens else None
                if reason is not None:
                    self.keep(token_ids[:-1], space, body.get("session_id"))  # the last token has no KV
                yield token_id, num_cached, reason
        finally:
            self.locked.remove(locked)
            self.num_running -= 1

    def keep(self, token_ids: list[int], space: Space, session_id: str | None) -> None:
        """Keep a request's pages, and evict others for them."""
        self.cache.insert(token_ids, space, session_id)
        locked = {name for names in self.locked for name in names} | set(self.cache.names(token_ids, space))
        while len(self.cache.pages) > self.args.num_pages:
            victims = [name for name in self.cache.leaves() if name not in locked]
            if not victims:
                break
            self.cache.evict(victims[0])
        self.publish()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = options("0.5.23")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--num-pages", type=int, default=256)
    parser.add_argument("--eagle", action="store_true", help="its keys are pairs of tokens")
    parser.add_argument("--windows", action="store_true", help="its model has sliding windows")
    parser.add_argument("--old-paths", dest="has_short_paths", action="store_false", help="/get_server_info only")
    return parsed(parser, argv)


def main() -> None:
    args = parse()
    uvicorn.run(FakeSglang(args).app, host="127.0.0.1", port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
