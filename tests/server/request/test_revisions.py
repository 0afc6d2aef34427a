"""Requests while their revision goes: prepared again before their output, else ended with a retryable error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from server.router.placement import Placement
from server.router.types import NoWorkerError, RouteRequest
from tests.server.conftest import ANSWER
from tests.server.gateway_app import PlainRouter, RunningGateway, gateway
from tests.server.scripted_worker import Die, ScriptedWorker
from tests.server.test_app import chat, post
from tests.waiting import until
from worker.wire import TokenizerBundle

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
Place = Callable[[RouteRequest], Any]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.request.request.PAUSE_S", 0.01)


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    match path:
        case "/v1/completions":
            return {"model": "tiny", "prompt": "Where is it?", "max_tokens": 64, **fields}
        case "/v1/responses":
            return {"model": "tiny", "input": "Where is it?", **fields}
        case "/v1/messages":
            return chat(max_tokens=64, **fields)
    return chat(**fields)


def by_revision(router: PlainRouter, monkeypatch: pytest.MonkeyPatch, *, is_silent: bool = False) -> None:
    """Make a router place requests at workers of their own revision only, as the real one does."""
    place = router.place

    async def own(route: RouteRequest) -> Placement:
        members = router.members
        try:
            router.members = [each for each in members if each.namespace == route.namespace]
            return await place(route)
        except NoWorkerError as error:
            raise NoWorkerError(str(error), retry_after_s=1.0, is_silent=is_silent) from None
        finally:
            router.members = members

    monkeypatch.setattr(router, "place", own)


async def switch(target: RunningGateway, worker: ScriptedWorker, bundle: TokenizerBundle) -> None:
    """Restart the worker with another revision."""
    worker.bundle = bundle
    member = replace(worker.member(), epoch_started_ms=1)
    target.router.members = [member]
    await until(lambda: target.models.revision(member) == bundle.revision)
    await until(lambda: target.models.get("tiny").fingerprint == member.namespace)


@pytest.fixture
def other(bundle: TokenizerBundle) -> TokenizerBundle:
    """A revision whose template makes other prompts."""
    return replace(bundle, revision="r2", block_size=32, chat_template="NEW " + (bundle.chat_template or ""))


@pytest.mark.parametrize("is_silent", [False, pytest.param(True, marks=pytest.mark.e2e)])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_a_held_request_is_prepared_again(
    path: str,
    stream: bool,
    is_silent: bool,
    worker: ScriptedWorker,
    other: TokenizerBundle,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while its stream has sent keep-alive comments."""
    async with gateway(worker, ping_s=0.02) as target:
        target.router.members = []
        by_revision(target.router, monkeypatch, is_silent=is_silent)
        monkeypatch.setattr("server.request.retry.MAX_WAITS", 10**6)
        asked = asyncio.create_task(post(target.url, body_of(path, stream=stream), path))
        await until(lambda: target.metrics.num_in_flight > 0)
        await switch(target, worker, other)
        status, _, raw = await asked
    assert status == 200, raw
    [received] = worker.received
    served = target.models.get("tiny")
    if path != "/v1/completions":
        assert served.tokenizer.decode(received.prompt_ids).startswith("NEW ")
    assert b'"error":{' not in raw
    words = raw.decode() if not stream else "".join(_texts(raw))
    assert ANSWER.split()[0] in words


def _texts(raw: bytes) -> list[str]:
    texts = []
    for line in raw.decode().splitlines():
        if line.startswith("data: {"):
            texts.append(json.dumps(json.loads(line[6:]), ensure_ascii=False))
    return texts


async def test_a_stream_that_has_begun_ends_with_a_retryable_error(
    worker: ScriptedWorker, other: TokenizerBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway(worker) as target:
        by_revision(target.router, monkeypatch)

        async def dies(asked: Any) -> Any:
            frames = worker.answer(asked)
            for _ in range(4):
                yield await anext(frames)
            await switch(target, worker, other)
            raise Die

        worker.behave = dies
        _, _, raw = await post(target.url, chat(stream=True))
    assert b'"code":"worker_lost"' in raw
    assert len(worker.received) == 1


@pytest.mark.parametrize("path", PATHS)
async def test_an_unread_answer_is_made_again(
    path: str, worker: ScriptedWorker, other: TokenizerBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway(worker) as target:
        by_revision(target.router, monkeypatch)

        async def dies_once(asked: Any) -> Any:
            is_first, num_frames = len(worker.received) == 1, 0
            async for frame in worker.answer(asked):
                yield frame
                num_frames += 1
                if is_first and num_frames == 4:
                    await switch(target, worker, other)
                    raise Die

        worker.behave = dies_once
        status, _, raw = await post(target.url, body_of(path), path)
    assert status == 200, raw
    assert ANSWER.split()[0] in raw.decode()
    assert len(worker.received) == 2


async def test_a_request_waits_for_a_silent_worker(worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than for one that has gone, and to its own deadline."""
    async with gateway(worker, request_timeout_s=30.0) as target:
        by_revision(target.router, monkeypatch, is_silent=True)
        members, target.router.members = target.router.members, []
        asked = [asyncio.create_task(post(target.url, chat(stream=number % 2 == 0))) for number in range(8)]
        await asyncio.sleep(0.5)
        assert not any(each.done() for each in asked)
        target.router.members = members
        assert [(await each)[0] for each in asked] == [200] * 8


async def test_the_deadline_ends_a_wait(worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(worker, request_timeout_s=0.3) as target:
        by_revision(target.router, monkeypatch, is_silent=True)
        target.router.members = []
        status, _, raw = await post(target.url, chat())
    assert (status, json.loads(raw)["error"]["code"]) == (504, "timeout")
