"""Prompts and answers of an engine whose worker is silent, gone, or refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from server.api.engine import rendering
from tests.server.api.engine_worker import APIS, WORDS, EngineWorker, engine_gateway, text_of
from tests.server.gateway_app import RunningGateway
from tests.server.scripted_worker import Refuse, script_of
from tests.server.sse_grammar import events
from tests.server.test_app import chat, post, post_once
from tests.waiting import until
from worker.common.capabilities import adapter_names
from worker.wire import Failed, Rendered


async def test_a_lost_worker_renders_nothing(engines: list[EngineWorker]) -> None:
    engines[0].refuses_render = Failed("not_ready", "gone", retryable=True)
    async with engine_gateway(*engines) as target:
        answers = [await post(target.url, chat()) for _ in range(4)]
    assert {status for status, _, _ in answers} == {200}


async def test_an_engine_without_the_adapter_renders_nothing(engines: list[EngineWorker]) -> None:
    engines[1].apis = (*APIS, *adapter_names(["pirate"]))
    async with engine_gateway(*engines) as target:
        await until(lambda: "pirate" in dict(target.models.names()))
        answers = [await post(target.url, chat() | {"model": "pirate"}) for _ in range(8)]
    assert {status for status, _, _ in answers} == {200}
    assert (engines[0].rendered, len(engines[1].rendered)) == ([], 8)


@asynccontextmanager
async def silent_gateway(engines: list[EngineWorker], **options: Any) -> AsyncIterator[RunningGateway]:
    """A gateway that has learnt the model, and whose workers are all silent now."""
    async with engine_gateway(*engines, **options) as target:
        for engine in engines:
            engine.silent = True
        await until(lambda: not target.fleet.live_workers())
        yield target


async def test_silent_workers_are_waited_for(engines: list[EngineWorker], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "MAX_WAITS", 0)
    async with silent_gateway(engines) as target:
        asked = asyncio.create_task(post(target.url, chat()))
        await asyncio.wait([asked], timeout=1.0)
        assert not asked.done()
        engines[1].silent = False
        status, _, _ = await asked
    assert status == 200


async def test_silent_workers_are_waited_for_until_the_deadline(engines: list[EngineWorker]) -> None:
    async with silent_gateway(engines, request_timeout_s=1.0) as target:
        status, _, raw = await post(target.url, chat())
    assert status == 504
    assert json.loads(raw)["error"]["code"] == "timeout"


async def test_a_gateway_that_stops_waits_for_no_engine(engines: list[EngineWorker]) -> None:
    async with engine_gateway(engines[0]) as target:
        engines[0].silent = True
        asked = asyncio.create_task(post(target.url, chat()))
        await until(lambda: target.endpoint.guards)
        target.endpoint.shutdown()
        status, _, raw = await asked
        assert not target.endpoint.guards
    assert (status, json.loads(raw)["error"]["code"]) == (503, "shutting_down")


async def test_workers_that_are_gone_are_not_waited_for_long(engines: list[EngineWorker]) -> None:
    async with engine_gateway(engines[0]) as target:
        engines[0].refuses_render = Failed("not_ready", "gone", retryable=True)
        status, _, _ = await post(target.url, chat())
    assert status == 503


async def test_a_worker_that_refuses_is_left(engines: list[EngineWorker]) -> None:
    engines[0].behave = script_of(then=Refuse(429, "queue_full", retry_after_s=1.0))
    _, _, raw = await post_once(engine_gateway(*engines), chat(stream=True))
    assert text_of(events(raw)) == "".join(WORDS)


TOO_LONG = Failed("context_length_exceeded", "This model's maximum context length is 16 tokens.", retryable=False)


async def test_the_longest_context_renders(engines: list[EngineWorker]) -> None:
    """A request goes where it fits, whichever worker the model was learnt from and whichever is idle."""
    engines[0].max_model_len, engines[0].refuses_render, engines[0].behave = 16, TOO_LONG, script_of(TOO_LONG)
    async with engine_gateway(*engines) as target:
        await until(lambda: target.models.get("tiny").max_model_len == 2048)
        answers = [await post(target.url, chat(max_tokens=100)) for _ in range(8)]
        answers += [await post(target.url, chat(max_tokens=None)) for _ in range(2)]
    assert {status for status, _, _ in answers} == {200}
    assert engines[0].rendered == []


async def test_a_longer_context_that_is_away(engines: list[EngineWorker], monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that only a silent worker can take waits for it. Above the longest known context it is a 400."""
    monkeypatch.setattr(rendering, "MAX_WAITS", 0)
    engines[0].max_model_len, engines[0].refuses_render = 16, TOO_LONG
    async with engine_gateway(*engines) as target:
        await until(lambda: target.models.get("tiny").max_model_len == 2048)
        engines[1].silent = True
        await until(lambda: len(target.fleet.live_workers()) == 1)
        asked = asyncio.create_task(post(target.url, chat(max_tokens=100)))
        await until(lambda: engines[0].rendered)
        assert not asked.done()
        engines[1].silent = False
        status, _, raw = await asked
        assert status == 200, raw
        engines[1].refuses_render = TOO_LONG
        status, _, raw = await post(target.url, chat(max_tokens=100))
        assert (status, json.loads(raw)["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_refusal_of_one_context_is_not_the_fleets(engines: list[EngineWorker]) -> None:
    """A worker whose engine is shorter than its entry is left for a longer one, also for pooling."""
    engines[0].max_model_len, engines[0].behave = 1024, script_of(TOO_LONG)
    engines[0].apis = engines[1].apis = (*APIS, "/v1/embeddings")
    async with engine_gateway(*engines) as target:
        await until(lambda: target.models.get("tiny").max_model_len == 2048)
        status, _, raw = await post(target.url, chat(stream=True))
    assert status == 200
    assert text_of(events(raw)) == "".join(WORDS)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses/input_tokens", {"model": "tiny", "input": [{"role": "user", "content": "Hi"}]}),
        ("/tokenize", {"messages": [{"role": "user", "content": "Hi"}], "return_token_strs": True}),
    ],
)
async def test_counts_are_those_of_the_engine(engines: list[EngineWorker], path: str, body: dict[str, Any]) -> None:
    """Where the engine's template differs from the bundle's, the engine is asked, for one token after the prompt."""
    engines[0].render = lambda path, body: Rendered(((1, 2, 3),), (1,))  # type: ignore[method-assign]
    async with engine_gateway(engines[0]) as target:
        status, headers, raw = await post(target.url, body, path)
    assert status == 200, raw
    answer = json.loads(raw)
    assert answer.get("input_tokens", answer.get("count")) == 3
    assert "x-headstart-ignored" not in headers
    assert [each.get("max_tokens", each.get("max_output_tokens")) for each in engines[0].rendered] == [1]


async def test_a_template_that_is_not_the_engines(engines: list[EngineWorker]) -> None:
    async with (
        engine_gateway(engines[0]) as target,
        aiohttp.ClientSession() as session,
        session.get(target.url + "/tokenizer_info") as response,
    ):
        assert (await response.json())["chat_template"] is None
