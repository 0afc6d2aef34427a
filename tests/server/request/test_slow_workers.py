"""Hung workers are found, slow ones are waited for, and both are cut at the deadline."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from server.workers import client
from tests.members import make_member
from tests.server.conftest import ANSWER
from tests.server.gateway_app import gateway
from tests.server.request.failing_workers import MakeWorker, stalls_after
from tests.server.scripted_worker import ScriptedWorker, until
from tests.server.sse_grammar import check_chat, events
from tests.server.test_app import chat, post
from worker.wire import Frame, GenerateRequest


async def test_a_hung_worker_is_found_and_its_stream_resumed(make: MakeWorker) -> None:
    hung, healthy = make(), make()
    hung.behave = stalls_after(hung, 4, hangs=True)
    async with gateway(hung, healthy, silent_s=0.3) as target:
        _, _, raw = await post(target.url, chat(stream=True))
        assert check_chat(raw) == [ANSWER]
        assert len(healthy.received[0].choices[0].output_ids) == 4


async def test_streams_outlive_a_pause_of_the_whole_fleet(make: MakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = [make(), make()]
    pause, num_paused = asyncio.Event(), 0

    def behaviour(worker: ScriptedWorker) -> Callable[[GenerateRequest], AsyncIterator[Frame]]:
        async def behave(request: GenerateRequest) -> AsyncIterator[Frame]:
            nonlocal num_paused
            num_sent = 0
            async for frame in worker.answer(request):
                if num_sent == 4:
                    num_paused += 1
                    for each in workers:
                        each.hung = True
                    await pause.wait()
                num_sent += 1
                yield frame

        return behave

    for worker in workers:
        worker.behave = behaviour(worker)
    async with gateway(*workers, silent_s=0.1) as target:
        asked = asyncio.create_task(post(target.url, chat(stream=True)))
        await until(lambda: num_paused)
        with monkeypatch.context() as during:
            during.setattr(client, "PROBE_TIMEOUT_S", 0.05)
            await until(lambda: workers[0].num_probed >= 4 and workers[1].num_probed >= 2)
        assert not asked.done()
        for worker in workers:
            worker.hung = False
        pause.set()
        _, _, raw = await asked
        assert check_chat(raw) == [ANSWER]
        assert [len(worker.received) for worker in workers] == [1, 0], "it was never taken elsewhere"


@pytest.mark.parametrize("wakes", ["reads", "ends", "lives", "not"])
async def test_a_fleet_that_wakes_during_the_probes_keeps_its_streams(wakes: str) -> None:
    """Or has ended them: their connections may carry other requests at that time."""
    workers = [make_member(name, url=name) for name in ("own", "other")]
    failed: list[str] = []
    watching = ExitStack()
    num_probed = 0

    async def is_alive(url: str) -> bool:
        nonlocal num_probed
        num_probed += url == "own"
        await asyncio.sleep(0)
        if url == "other":
            if wakes == "reads":
                stream.last_read_s = time.monotonic()
            elif wakes == "ends":
                watching.close()
        return url == "other" or (wakes == "lives" and num_probed == 2)

    pool: Any = SimpleNamespace(unpackers=[], is_alive=is_alive)
    request: Any = None
    stream = client.GenerateStream(pool, "own", request)
    connection: Any = SimpleNamespace(fail=failed.append)
    stream._connection = connection
    stream.last_read_s -= 60.0
    watch = client.StallWatch(pool, lambda: workers, 5.0)
    watching.enter_context(watch.watching(stream))
    await watch._probe()
    assert len(failed) == (wakes == "not")


async def test_a_pause_without_end_ends_in_an_error(make: MakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PROBE_TIMEOUT_S", 0.05)
    worker = make()
    worker.behave = stalls_after(worker, 4, hangs=True)
    async with gateway(worker, silent_s=0.1, no_successor_timeout_s=0.5) as target:
        _, _, raw = await post(target.url, chat(stream=True))
        assert "error" in events(raw)[-1]


async def test_a_slow_but_living_worker_is_waited_for(make: MakeWorker) -> None:
    slow = make()

    async def behave(request: GenerateRequest) -> AsyncIterator[Frame]:
        num_sent = 0
        async for frame in slow.answer(request):
            if num_sent == 5:  # with tokens still to come: all but the end would not be asked of anybody else
                await asyncio.sleep(0.6)
            yield frame
            num_sent += 1

    slow.behave = behave
    async with gateway(slow, silent_s=0.1) as target:
        _, _, raw = await post(target.url, chat(stream=True))
        assert check_chat(raw) == [ANSWER]
        assert len(slow.received) == 1


async def test_the_deadline_is_a_504_or_an_error_event(make: MakeWorker) -> None:
    worker = make()
    worker.behave = stalls_after(worker, 4)
    async with gateway(worker, request_timeout_s=2.0) as target:
        status, _, raw = await post(target.url, chat())
        assert (status, json.loads(raw)["error"]["code"]) == (504, "timeout")
        deadline_s = worker.received[0].deadline_s
        assert deadline_s is not None
        assert 0.0 < deadline_s <= 2.0, "the worker knows how long the client waits"
        status, _, raw = await post(target.url, chat(stream=True))
        assert status == 200
        assert events(raw)[-1]["error"]["code"] == "timeout"
