"""The HTTP API of the fake engine, as vLLM has it, and its options."""

from __future__ import annotations

import argparse
import time

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tests.fake_engine.options import options, parsed
from tests.fake_engine.rank import Rank
from tests.fake_engine.text import TextApis


class FakeEngine:
    """The HTTP server."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.started_s = time.time()
        self.ranks = [Rank(args.first_rank + number, args) for number in range(args.ranks)]
        self.text = TextApis(self)
        self.paused = self.sleeping = False
        self.app = Starlette(
            routes=[
                Route("/health", self.health),
                Route("/version", self.version),
                Route("/v1/models", self.models),
                Route("/kv_event_sources", self.sources),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/metrics", self.metrics),
                Route("/reset_prefix_cache", self.reset, methods=["POST"]),
                Route("/fake/loras", self.loras, methods=["POST"]),
                Route("/fake/core", self.core, methods=["POST"]),
                Route("/is_paused", self.is_paused),
                *([Route("/server_info", self.server_info)] if args.dev_mode else []),
                *([] if args.no_text_api else self.text.routes()),
            ],
        )

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    def refused(self, request: Request) -> Response | None:
        key = self.args.api_key
        if key and request.headers.get("authorization") != f"Bearer {key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        return None

    async def health(self, request: Request) -> Response:
        return Response()

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": self.args.version})

    async def server_info(self, request: Request) -> Response:
        config = {"dtype": f"torch.{self.args.dtype or 'float32'}", "quantization": self.args.quantization or None}
        return JSONResponse({"vllm_config": {"model_config": config}})

    async def models(self, request: Request) -> Response:
        if (refused := self.refused(request)) is not None:
            return refused
        about = {"root": str(self.args.folder), "max_model_len": self.args.max_model_len}
        base = [{"id": name, **about} for name in (self.args.model, *self.args.alias)]
        loras = [{"id": name, "root": name, "parent": self.args.model} for name in self.args.lora]
        return JSONResponse({"object": "list", "data": [*base, *loras]})

    async def sources(self, request: Request) -> Response:
        found = {
            str(number): {
                "publisher": "zmq",
                "endpoint": self.args.said_events or e.endpoint,
                "replay_endpoint": e.replay,
                "topic": e.topic,
            }
            for number, rank in enumerate(self.ranks, self.args.first_rank)
            if (e := rank.events) is not None
        }
        return JSONResponse(found)

    async def tokenize(self, request: Request) -> Response:
        body = await request.json()
        add_special = body.get("add_special_tokens", True)
        ids = self.args.tokenizer.encode(body["prompt"], add_special_tokens=add_special).ids
        return JSONResponse({"tokens": [i + self.args.tokenizer_shift for i in ids], "count": len(ids)})

    async def metrics(self, request: Request) -> Response:
        is_one = self.args.api_server_count == 1
        lines = [f"process_start_time_seconds {self.started_s}"] if is_one else []
        for number, rank in enumerate(self.ranks, self.args.first_rank):
            label = f'engine="{number}",model_name="{self.args.model}"'
            caching = f'enable_prefix_caching="{not self.args.no_prefix_caching}"'
            pool = rank.pool
            if is_one or rank.num_steps:  # with several, a gauge has no sample before the first request
                lines += [
                    f"vllm:num_requests_running{{{label}}} {float(rank.num_running)}",
                    f"vllm:num_requests_waiting{{{label}}} {float(rank.num_waiting)}",
                    f"vllm:kv_cache_usage_perc{{{label}}} {rank.usage}",
                ]
            lines += [
                f"vllm:generation_tokens_total{{{label}}} {float(rank.num_steps)}",
                f'vllm:engine_sleep_state{{sleep_state="awake",{label}}} {float(not self.sleeping)}',
                f'vllm:cache_config_info{{block_size="{pool.block_size}",{caching},'
                f'num_gpu_blocks="{pool.num_blocks * len(self.ranks)}",{label}}} 1.0',
                f"vllm:request_prefill_kv_computed_tokens_sum{{{label}}} {float(rank.prefill_tokens)}",
                f"vllm:request_prefill_time_seconds_sum{{{label}}} {rank.prefill_s}",
                f"vllm:request_prefill_time_seconds_count{{{label}}} {float(rank.num_prefills)}",
                f"vllm:prefix_cache_hits_total{{{label}}} {float(rank.cached_tokens)}",
            ]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def reset(self, request: Request) -> Response:
        for rank in self.ranks:
            rank.reset()
        return JSONResponse({"success": True})

    async def core(self, request: Request) -> Response:
        """Stop the core, pause it, put it to sleep, or end all three: {"stopped": false, ...}."""
        wanted = await request.json()
        self.paused, self.sleeping = wanted.get("paused", False), wanted.get("sleeping", False)
        for rank in self.ranks:
            rank.stop(bool(wanted.get("stopped") or self.paused or self.sleeping))
        return Response()

    async def is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": self.paused})

    async def loras(self, request: Request) -> Response:
        self.args.lora = (await request.json())["loras"]
        return Response()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = options("0.32.0")
    parser.add_argument("--alias", action="append", default=[], help="another name that it is served under")
    parser.add_argument("--topic", default="kv")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--first-rank", type=int, default=0, help="headers count from this one")
    parser.add_argument("--api-server-count", type=int, default=1)
    parser.add_argument("--api-key", default="")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--num-blocks", type=int, default=256)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--prefill-tokens-per-s", type=float, default=50_000.0)
    parser.add_argument("--request-s", type=float, default=0.0, help="the fixed part of a prefill")
    parser.add_argument("--chunk-s", type=float, default=1.0, help="the longest step of a prefill")
    parser.add_argument("--mean-tokens", type=int, default=64)
    parser.add_argument("--no-text-api", action="store_true", help="as vLLM without --enable-scale-out")
    parser.add_argument("--refuses-text", action="store_true", help="refuses every chat")
    parser.add_argument("--said-events", help="the endpoint that it says it has (default: the true one)")
    parser.add_argument("--chat-template", help="another one than its folder has")
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--ignore-salt", action="store_true")
    parser.add_argument("--dev-mode", action="store_true", help="says its dtype and quantisation")
    parser.add_argument("--dtype", default="")
    parser.add_argument("--quantization", default="")
    parser.add_argument("--weights", default="", help="other weights give other tokens")
    parser.add_argument("--tokenizer-shift", type=int, default=0, help="another tokenizer")
    args = parsed(parser, argv)
    args.eos = [2]
    return args


def main() -> None:
    args = parse()
    uvicorn.run(FakeEngine(args).app, host="127.0.0.1", port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
