"""A worker that drains, and one whose engine dies: every stream ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from tests.waiting import HANG_S
from tests.worker.http.slow_runner import SlowRunner, assert_idle
from tests.worker.live_worker import LiveWorker
from tests.worker.scheduler.arithmetic_runner import answer
from tests.worker.scheduler.engine import generate
from worker.common.frames import FrameReader
from worker.contracts.metrics import WorkerMetrics
from worker.http.service import WorkerService
from worker.scheduler.request import Constraint
from worker.wire import Failed, GenerateRequest, Grammar


def test_a_drain_while_the_model_loads_reaches_the_engine() -> None:
    """Else the registry shows an idle worker that refuses every request."""
    service, calls = WorkerService(WorkerMetrics()), list[str]()
    service.drain()
    service.start(SimpleNamespace(start=lambda: calls.append("start"), drain=lambda: calls.append("drain")))  # type: ignore[arg-type]
    assert calls == ["start", "drain"]


async def test_draining_lets_the_open_finish_and_refuses_the_new(worker: LiveWorker, runner: SlowRunner) -> None:
    runner.free_running.clear()
    task = asyncio.create_task(worker.generate(generate(range(10), 5)))
    await worker.until(lambda: worker.service.num_open == 1)
    async with worker.http.post(worker.url + "/drain") as response:
        assert await response.json() == {"draining": True, "open": 1}
    status, got = await worker.generate(generate(range(4), 2))
    assert status == 503
    assert got.last == Failed("draining", "the worker is draining", retryable=True)
    async with worker.http.get(worker.url + "/health/ready") as response:
        assert response.status == 503
    async with worker.http.get(worker.url + "/health/live") as response:
        assert response.status == 200
    runner.free_running.set()
    await asyncio.wait_for(worker.service.finish_drain(2 * HANG_S), HANG_S)
    status, got = await task
    assert got.tokens[0] == answer(range(10), 100, 5)


async def test_requests_that_outlive_the_grace_fail_retryably(worker: LiveWorker, runner: SlowRunner) -> None:
    runner.free_running.clear()
    task = asyncio.create_task(worker.generate(generate(range(10), 400)))
    await worker.until(lambda: worker.service.num_open == 1)
    worker.service.drain()
    drained = asyncio.create_task(worker.service.finish_drain(0.02))
    await asyncio.sleep(0.05)
    runner.free_running.set()
    await drained
    _, got = await task
    assert got.last == Failed("draining", "the worker stops", retryable=True)
    await assert_idle(worker)


async def test_a_dead_engine_fails_every_stream_and_is_seen(worker: LiveWorker, runner: SlowRunner) -> None:
    runner.free_running.clear()
    tasks = [asyncio.create_task(worker.generate(generate([i, 2, 3], 5))) for i in range(4)]
    await worker.until(lambda: worker.service.num_open == 4)
    runner.fails = lambda step: True
    runner.free_running.set()
    for _, got in await asyncio.gather(*tasks):
        assert isinstance(got.last, Failed)
    async with worker.http.get(worker.url + "/health/live") as response:
        assert response.status == 503
        assert "does not compute" in (await response.json())["reason"]
    assert (await worker.generate(generate(range(4), 2)))[0] == 503


async def test_the_engine_dies_while_a_grammar_is_compiled(
    worker: LiveWorker, runner: SlowRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream would never end, nor the drain that waits for it."""
    entered, compiled = asyncio.Event(), asyncio.Event()

    async def constraints(request: GenerateRequest) -> dict[int, Constraint]:
        if request.sampling.grammar is not None:
            entered.set()
            await compiled.wait()
        return {}

    monkeypatch.setattr(worker.engine.grammars, "constraints", constraints)
    late = asyncio.create_task(worker.generate(generate([4, 5, 6], 5, grammar=Grammar("regex", "a"))))
    await entered.wait()
    runner.fails = lambda step: True
    await worker.generate(generate([1, 2, 3], 5))
    await worker.until(lambda: worker.service.draining)
    compiled.set()
    async with asyncio.timeout(HANG_S):
        status, got = await late
        assert (status, type(got.last)) == (503, Failed)
        assert got.last.retryable
        await worker.service.finish_drain(0.01)
        for method, path in (("POST", "/purge"), ("GET", "/debug/state")):
            async with worker.http.request(method, worker.url + path) as response:
                assert response.status == 503
                (failed,) = FrameReader().feed(await response.read())
                assert failed.code == "worker_lost"
                assert "the engine died" in failed.message


async def test_streams_opened_on_a_dead_engine_do_not_block_the_drain(worker: LiveWorker, runner: SlowRunner) -> None:
    runner.fails = lambda step: True
    await worker.generate(generate([1, 2, 3], 5))
    await worker.until(lambda: worker.service.draining)
    worker.service.draining = False  # as for a request that comes while the engine dies
    stream = await worker.service.submit(generate([4, 5, 6], 5))
    async with asyncio.timeout(HANG_S):
        await worker.service.finish_drain(2 * HANG_S)
    assert stream.ended


@pytest.mark.parametrize("grammar", [Grammar("regex", "a"), None])
async def test_the_worker_drains_while_a_request_is_prepared(
    worker: LiveWorker, monkeypatch: pytest.MonkeyPatch, grammar: Grammar | None
) -> None:
    """The request is refused."""

    async def constraints(request: GenerateRequest) -> dict[int, Constraint]:
        worker.service.drain()
        return {}

    monkeypatch.setattr(worker.engine.grammars, "constraints", constraints)
    status, got = await worker.generate(generate([4, 5, 6], 5, grammar=grammar))
    assert status == 503
    assert got.last == Failed("draining", "the worker is draining", retryable=True)
