"""Prompts and answers of an engine whose worker is silent, gone, or refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from server.api.engine import text as engine_text
from tests.server.api.engine_worker import APIS, WORDS, EngineWorker, engine_gateway, text_of
from tests.server.gateway_app import RunningGateway
from tests.server.scripted_worker import Refuse, script_of
from tests.server.sse_grammar import events
from tests.server.test_app import chat, post, post_once
from tests.waiting import until
from worker.common.capabilities import adapter_names
from worker.wire import (
    Failed,
)


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
    monkeypatch.setattr(engine_text, "MAX_WAITS", 0)
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
        await until(lambda: target.endpoint.preparing)
        target.endpoint.shutdown()
        status, _, raw = await asked
        assert not target.endpoint.preparing
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
