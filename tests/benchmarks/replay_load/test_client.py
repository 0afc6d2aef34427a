"""The client counts a stream's tokens and times, and every failure of a server becomes an outcome."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.replay_load.client import AnswerError, ChatClient, Outcome, Target, first_model
from benchmarks.replay_load.workload import Turn
from tests.waiting import HANG_S

TURN = Turn([{"role": "user", "content": "Hi"}], 100, tools=[{"type": "function"}])


def event(delta: dict[str, object] | None, **more: object) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": None}]
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


USAGE = {"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 32}}
WHOLE = [
    event({"role": "assistant", "content": ""}),
    b": keep-alive\n\n",
    event({"content": "a"}),
    event({"content": "b"}) + event({"tool_calls": [{"index": 0}]}),
    event(None, usage=USAGE),
    b"data: [DONE]\n\n",
]


async def answered(parts: list[bytes], status: int = 200, *, cut: bool = False) -> tuple[Outcome, dict[str, object]]:
    """The outcome of one turn at a server that writes `parts`, and the body that it was sent."""
    seen: dict[str, object] = {}

    async def chat(request: web.Request) -> web.StreamResponse:
        seen.update(await request.json(), key=request.headers["authorization"])
        if status != 200:
            return web.json_response({"error": {"message": "busy"}}, status=status)
        response = web.StreamResponse(headers={"x-headstart-worker": "worker-0"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0.01)
        if cut and request.transport is not None:
            request.transport.abort()
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    async with TestServer(app) as server:
        target = Target("here", str(server.make_url("")).rstrip("/"), "some-model", "secret")
        async with ChatClient(target, max_tokens=16, timeout_s=HANG_S) as client:
            return await client.ask("c", 2, TURN), seen


async def test_a_whole_stream() -> None:
    outcome, seen = await answered(WHOLE)
    assert outcome.error is None
    assert (outcome.num_prompt_tokens, outcome.num_cached_tokens, outcome.num_output_tokens) == (40, 32, 3)
    assert (outcome.worker, outcome.turn) == ("worker-0", 2)
    assert 0 < outcome.ttft_s < outcome.total_s
    assert len(outcome.gaps_s) == 2
    assert outcome.time_per_token_s == pytest.approx((outcome.total_s - outcome.ttft_s) / 2)
    assert seen["max_tokens"] == 16
    assert (seen["model"], seen["stream"], seen["tools"]) == ("some-model", True, [{"type": "function"}])
    assert seen["key"] == "Bearer secret"


async def test_events_cut_at_any_byte_are_whole_events() -> None:
    stream = b"".join(WHOLE)
    outcome, _ = await answered([stream[i : i + 37] for i in range(0, len(stream), 37)])
    assert outcome.error is None
    assert outcome.num_output_tokens == 3


@pytest.mark.parametrize(
    ("parts", "status", "cut", "says"),
    [
        ([], 429, False, "429: "),
        (WHOLE[:4], 200, False, "without [DONE]"),
        (WHOLE[:4], 200, True, "Client"),
        ([*WHOLE[:4], b'data: {"error": {"message": "lost"}}\n\n'], 200, False, "lost"),
        ([WHOLE[0], b"data: [DONE]\n\n"], 200, False, "without a token"),
        ([b"data: {oops\n\n"], 200, False, "JSONDecodeError"),
    ],
)
async def test_a_failure_is_an_outcome(parts: list[bytes], status: int, cut: bool, says: str) -> None:
    outcome, _ = await answered(parts, status, cut=cut)
    assert outcome.error is not None
    assert says in outcome.error


async def test_the_first_model_is_asked_for() -> None:
    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "a-model"}, {"id": "b-model"}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    async with TestServer(app) as server:
        assert await first_model(str(server.make_url("")).rstrip("/"), "key") == "a-model"
        with pytest.raises(AnswerError, match="--model"):
            await first_model(str(server.make_url("/elsewhere")), "key")
