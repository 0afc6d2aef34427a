"""The worker over HTTP: refusals, streams to their last frame, clients that leave."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import gc

import aiohttp
import msgpack
import msgspec
import pytest
from msgspec.structs import replace
from uvicorn.protocols.http.h11_impl import H11Protocol

from cache.records import WorkerState
from tests.worker.http.slow_runner import NUM_BLOCKS, SlowRunner, assert_idle
from tests.worker.live_worker import BUNDLE, LiveWorker, live_worker, serve
from tests.worker.scheduler.arithmetic_runner import answer
from tests.worker.scheduler.engine import generate
from worker.common.frames import FrameReader
from worker.contracts.metrics import WorkerMetrics
from worker.http.service import WorkerService
from worker.http.streams import QueueLimits
from worker.scheduler.request import Request, RequestChoice, TokenSequence
from worker.wire import End, Failed, Started, TokenizerBundle, Tokens, pack_request, unpack


async def test_a_stream_has_every_frame_in_order(worker: LiveWorker) -> None:
    request = generate(range(10), 6, n=2)
    frames = []
    async with worker.http.post(worker.url + "/generate", data=pack_request(request)) as response:
        assert response.status == 200
        assert response.headers["content-type"] == "application/msgpack"
        reader = FrameReader()
        async for data in response.content.iter_any():
            frames += reader.feed(data)
    assert isinstance(frames[0], Started)
    assert isinstance(frames[-1], End)
    for choice in range(2):
        token_ids = [f.token_ids[0] for f in frames if isinstance(f, Tokens) and f.choice == choice]
        assert token_ids == answer(range(10), 100 + choice, 6)


async def test_buffered_frames_are_taken_together(worker: LiveWorker, runner: SlowRunner) -> None:
    stream = await worker.service.submit(generate(range(10), 30))
    await worker.until(lambda: stream.ended)
    assert len(list(FrameReader().feed(await stream.take()))) == 33
    assert await stream.take() == b""
    worker.service.release(stream)


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"epoch": "another"}, 409, "wrong_epoch"),
        ({"prompt_ids": []}, 400, "invalid_request"),
        ({"prompt_ids": [1] * 600}, 400, "context_length_exceeded"),
        ({"prompt_ids": [1 << 20]}, 400, "invalid_request"),
        ({"protocol": 999}, 409, "wrong_protocol"),
        ({"root": b""}, 400, "invalid_request"),
    ],
)
async def test_refusals(worker: LiveWorker, change, status: int, code: str) -> None:
    got_status, got = await worker.generate(replace(generate(range(4), 2), **change))
    assert got_status == status
    assert isinstance(got.last, Failed)
    assert got.last.code == code
    assert worker.service.num_open == 0


@pytest.mark.parametrize("body", [b"", b"\xc1", b"{}", msgpack.packb([1, 2]), msgpack.packb({"protocol": 1})])
async def test_an_invalid_body_is_refused(worker: LiveWorker, body: bytes) -> None:
    async with worker.http.post(worker.url + "/generate", data=body) as response:
        assert response.status == 400
        (failed,) = FrameReader().feed(await response.read())
        assert isinstance(failed, Failed)
    async with worker.http.get(worker.url + "/generate") as response:
        assert response.status == 405


async def test_the_epoch_that_was_routed_to_is_served(worker: LiveWorker) -> None:
    status, _ = await worker.generate(replace(generate(range(4), 2), epoch="e1"))
    assert status == 200
    async with worker.http.post(worker.url + "/purge") as response:
        epoch = (await response.json())["epoch"]
    assert epoch != "e1"
    status, _ = await worker.generate(replace(generate(range(4), 2), epoch="e1"))
    assert status == 409
    status, got = await worker.generate(replace(generate(range(4), 2), epoch=epoch))
    assert status == 200
    assert got.tokens[0] == answer(range(4), 100, 2)


async def test_a_full_queue_is_429(runner: SlowRunner) -> None:
    runner.free_running.clear()
    async with live_worker(
        runner, NUM_BLOCKS, 4, queue_limits=QueueLimits(max_waiting_requests=2), max_num_seqs=1
    ) as worker:
        tasks = [asyncio.create_task(worker.generate(generate(range(4), 2)))]
        await worker.until(lambda: worker.service.num_open == 1 and worker.service.queue.num_requests == 0)
        tasks += [asyncio.create_task(worker.generate(generate(range(4), 2))) for _ in range(2)]
        await worker.until(lambda: worker.service.num_open == 3)
        status, got = await worker.generate(generate(range(4), 2))
        assert status == 429
        assert isinstance(got.last, Failed)
        assert (got.last.code, got.last.message) == ("queue_full", "2 requests wait already")
        assert b'headstart_worker_request_refusals_total{code="queue_full"} 1.0' in worker.service.metrics.render()
        fresh = generate(range(4), 3)  # a stream that another worker has begun is taken
        begun = (replace(fresh.choices[0], output_ids=(answer(range(4), 100, 1)[0],)),)
        tasks.append(asyncio.create_task(worker.generate(replace(fresh, choices=begun))))
        await worker.until(lambda: worker.service.num_open == 4)
        runner.free_running.set()
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 4


@pytest.mark.parametrize("tokens_before", [0, 3])
async def test_a_client_that_leaves_aborts(worker: LiveWorker, runner: SlowRunner, tokens_before: int) -> None:
    runner.free_running.clear()
    body = pack_request(replace(generate(range(10), 400), tracestate="x" * 200_000))  # its rest waits for the app
    async with worker.http.post(worker.url + "/generate", data=body) as response:
        reader, num_tokens = FrameReader(), 0
        for _ in range(tokens_before):
            runner.steps_allowed.release()
        while num_tokens < tokens_before:
            frames = list(reader.feed(await response.content.readany()))
            num_tokens += sum(isinstance(frame, Tokens) for frame in frames)
        response.close()
    await worker.until(lambda: worker.service.num_open == 0)
    runner.free_running.set()
    await assert_idle(worker)
    assert len(runner.steps) <= tokens_before + 2


async def test_a_client_that_leaves_the_queue_is_never_run(worker: LiveWorker, runner: SlowRunner) -> None:
    runner.free_running.clear()
    first = asyncio.create_task(worker.generate(generate([1] * 500, 2)))
    await worker.until(lambda: worker.service.num_open == 1)
    second = asyncio.create_task(worker.generate(generate([2] * 10, 2)))
    await worker.until(lambda: worker.service.num_open == 2)
    second.cancel()
    await worker.until(lambda: worker.service.num_open == 1)
    runner.free_running.set()
    assert (await first)[0] == 200
    assert not any(2 in sequence.token_ids[:1] for step in runner.steps for sequence in step.sequences)


async def test_abort_of_a_choice_and_of_a_request(worker: LiveWorker, runner: SlowRunner) -> None:
    runner.free_running.clear()
    task = asyncio.create_task(worker.generate(replace(generate(range(10), 100, n=2), request_id="mine")))
    runner.steps_allowed.release()
    await worker.until(lambda: len(runner.steps) == 1)

    async def abort(body) -> int:
        async with worker.http.post(worker.url + "/abort", data=msgspec.msgpack.encode(body)) as response:
            assert response.status == 200
            return msgpack.unpackb(await response.read())["found"]

    assert await abort({"request_id": "other", "choice": None}) == 0
    assert await abort({"request_id": "mine", "choice": 0}) == 1
    runner.free_running.set()
    _, got = await task
    assert got.finished[0].reason == "abort"
    assert got.finished[1].reason == "length"
    assert isinstance(got.last, End)
    assert await abort({"request_id": "mine"}) == 0
    async with worker.http.post(worker.url + "/abort", data=b"\xc1") as response:
        assert response.status == 400


async def test_state_and_bundle(worker: LiveWorker) -> None:
    await worker.generate(generate(range(10), 5))
    async with worker.http.get(worker.url + "/state") as response:
        state = unpack(await response.read(), WorkerState)
    assert state.member.epoch == "e1"
    assert state.load.num_blocks == NUM_BLOCKS
    async with worker.http.get(worker.url + "/bundle") as response:
        assert unpack(await response.read(), TokenizerBundle) == BUNDLE


async def test_metrics_and_debug_state(worker: LiveWorker, runner: SlowRunner) -> None:
    await worker.generate(generate(range(10), 5))
    async with worker.http.get(worker.url + "/metrics") as response:
        text = await response.text()
    assert "headstart_worker_output_tokens_total 5.0" in text
    assert 'headstart_worker_batch_growth_total{reason="idle"} 1.0' in text
    async with worker.http.get(worker.url + "/debug/state") as response:
        state = await response.json()
    assert state["num_requests"] == 0
    assert state["pool"]["num_free_blocks"] == NUM_BLOCKS - 1


async def test_a_worker_outside_the_index_is_ready_and_reports_it(worker: LiveWorker) -> None:
    worker.service.index_problem = lambda: "nothing published for 9 s: no connection to Redis"
    async with worker.http.get(worker.url + "/health/ready") as response:
        assert response.status == 200
        assert await response.json() == {"status": "ok", "index": "nothing published for 9 s: no connection to Redis"}


async def test_before_the_model_is_loaded() -> None:
    service = WorkerService(WorkerMetrics())
    service.progress = "loading layer 3 of 30"
    async with serve(service) as url, aiohttp.ClientSession() as http:
        async with http.get(url + "/health/live") as response:
            assert response.status == 200
        async with http.get(url + "/health/ready") as response:
            assert response.status == 503
            assert (await response.json())["reason"] == "loading layer 3 of 30"
        async with http.post(url + "/generate", data=pack_request(generate(range(4), 2))) as response:
            assert response.status == 503
            (failed,) = FrameReader().feed(await response.read())
            assert failed == Failed("not_ready", "the worker is loading layer 3 of 30", retryable=True)
        async with http.get(url + "/bundle") as response:
            assert response.status == 503


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("runner", ["blocking", "overlapping"], indirect=True)
async def test_five_hundred_aborted_and_finished_leave_nothing(worker: LiveWorker, runner: SlowRunner) -> None:
    async def one(client: LiveWorker, i: int) -> None:
        task = asyncio.create_task(client.generate(generate([i % 50, *range(i % 40)], 1 + i % 30, n=1 + i % 3)))
        if i % 2:
            await asyncio.sleep((i % 7) / 1000)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            status, got = await task
            assert status == 200
            assert isinstance(got.last, End)

    def num_objects() -> int:
        """All but the event loop's timers: it keeps up to a hundred cancelled ones."""
        gc.collect()
        return sum(type(each) not in (asyncio.TimerHandle, contextvars.Context) for each in gc.get_objects())

    def num_connections() -> int:
        return sum(type(each) is H11Protocol for each in gc.get_objects())

    def num_held() -> int:
        gc.collect()
        return sum(type(each) in (Request, TokenSequence, RequestChoice) for each in gc.get_objects())

    num_tasks, num_held_before = len(asyncio.all_tasks()), num_held()  # by what ran before in this process
    nums = []
    for first in range(0, 500, 100):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            client = dataclasses.replace(worker, http=http)
            await asyncio.gather(*(one(client, i) for i in range(first, first + 100)))
        await assert_idle(worker)
        await worker.until(lambda: num_connections() == 0)  # each that is kept alive is some thirty objects
        runner.steps.clear()
        nums.append(num_objects())
    assert num_held() <= num_held_before
    assert nums[-1] - nums[0] < 200, "one object a request would be 400"
    await worker.http.close()
    await worker.until(lambda: len(asyncio.all_tasks()) <= num_tasks)
