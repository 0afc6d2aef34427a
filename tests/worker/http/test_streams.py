"""Slow readers, and the limits of the queue."""

from __future__ import annotations

import asyncio
import random

import pytest
from msgspec.structs import replace

from tests.worker.scheduler.engine import generate
from worker.common.frames import FrameReader
from worker.contracts.engine import RequestKey
from worker.contracts.rates import QueuePace, StartInterval
from worker.http.streams import MAX_COALESCED_FRAMES, QueueAccounting, QueueLimits, Stream
from worker.wire import Failed, Frame, Tokens, pack


async def test_a_slow_reader_gets_every_frame_in_order() -> None:
    stream = Stream(RequestKey(0), generate([1]))
    frames = [Tokens(0, (number,)) for number in range(2 * MAX_COALESCED_FRAMES + 1)]
    for frame in frames:
        stream.put(frame)
    stream.close()
    reader, read = FrameReader(), []
    while data := await stream.take():
        read += reader.feed(data)
    assert read == frames


@pytest.mark.parametrize("seed", range(20))
async def test_frames_that_pass_a_waiting_reader_keep_their_order(seed: int) -> None:
    """Whenever the connection takes writes, and the reader is slow to send what it has taken."""
    rng, stream = random.Random(seed), Stream(RequestKey(0), generate([1]))
    reader, read, num_direct = FrameReader(), list[Frame](), 0

    def write(data: bytes) -> bool:
        nonlocal num_direct
        if rng.random() < 0.4:
            return False
        num_direct += 1
        read.extend(reader.feed(data))
        return True

    async def answer() -> None:
        data = await stream.take()
        while data or not stream.is_taken:
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
            read.extend(reader.feed(data))
            data = await stream.take(write=write)

    task = asyncio.create_task(answer())
    frames = [Tokens(0, (number,)) for number in range(200)]
    for frame in frames:
        stream.put(frame)
        if rng.random() < 0.7:
            stream.flush()
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
    stream.close()
    await task
    assert read == frames
    assert num_direct


def test_a_tenant_fills_its_own_share_only() -> None:
    queue = QueueAccounting(QueueLimits(max_queued_tokens=100, max_waiting_requests=1000))
    heavy, weak = generate([1] * 10, tenant="heavy"), generate([1] * 10, tenant="weak")
    num_heavy = 0
    while queue.refusal(heavy, QueuePace()) is None:
        queue.add(heavy)
        num_heavy += 1
    assert num_heavy == 10
    num_weak = 0
    while queue.refusal(weak, QueuePace()) is None:
        queue.add(weak)
        num_weak += 1
    assert num_weak == 5
    for _ in range(num_heavy):
        queue.remove(heavy)
    assert queue.refusal(weak, QueuePace()) is None, "alone again, the whole queue is its own"
    for _ in range(num_weak):
        queue.remove(weak)
    assert queue.num_requests == 0


def test_a_long_wait_is_refused_with_a_retry_time() -> None:
    queue = QueueAccounting(QueueLimits(max_queue_s=5.0))
    heavy, weak = generate([1], tenant="heavy"), generate([1], tenant="weak")
    pace = QueuePace(sure_interval_s=0.5)
    for _ in range(10):
        assert queue.refusal(heavy, pace) is None
        queue.add(heavy)
    queue.add(heavy)
    refused = queue.refusal(heavy, pace)
    assert refused is not None
    assert (refused.code, refused.retryable, refused.retry_after_s) == ("queue_full", True, pytest.approx(5.5))
    assert queue.refusal(weak, pace) is None
    assert queue.wait_s("weak", pace) == 1.0, "two tenants take turns"
    urgent = replace(weak, deadline_s=0.9)
    assert queue.refusal(urgent, pace) is not None
    assert queue.refusal(replace(weak, deadline_s=2.0), pace) is None


def test_an_empty_queue_refuses_no_request() -> None:
    queue = QueueAccounting(QueueLimits(max_queue_s=0.0, max_queued_tokens=1))
    assert queue.refusal(generate([1] * 1000, deadline_s=0.0), QueuePace(100.0, 100.0)) is None


def test_failed_without_a_retry_time_is_packed_for_old_peers() -> None:
    reader = FrameReader()
    for failed in (Failed("queue_full", "m", True, 2.5), Failed("draining", "m", True)):
        assert list(reader.feed(pack(failed))) == [failed]
    assert len(pack(Failed("draining", "m", True))) < len(pack(Failed("draining", "m", True, 0.0)))


def test_the_interval_between_starts_with_a_queue() -> None:
    starts = StartInterval()
    starts.record(3, 0, 0.0)
    starts.record(1, 0, 50.0)
    starts.record(0, 1, 60.0)
    starts.record(1, 0, 70.0)
    assert starts.mean_s == 0.0, "none waited longer than it had to"
    for step in range(1, 101):
        starts.record(int(step % 5 == 0), 4, 100.0 + 0.1 * step)
    assert starts.mean_s == pytest.approx(0.5, rel=0.05)
    assert starts.sure_s(110.0) == pytest.approx(starts.mean_s, rel=0.1), "they are regular"


def test_few_starts_say_nothing_of_the_next_ones() -> None:
    starts, now_s = StartInterval(), 0.0
    for number in range(8):
        starts.record(0, 9, now_s)
        assert starts.sure_s(now_s) == 0.0, number
        starts.record(1, 8, now_s := now_s + 1.0)
    assert starts.sure_s(now_s) == pytest.approx(1.0)
    starts.record(1, 0, now_s + 1.0)
    assert starts.sure_s(now_s + 1.0) == 0.0, "none waits"
    starts.record(0, 9, later_s := now_s + 60.0)
    assert starts.sure_s(later_s) == 0.0, "a later queue is another one"
    starts.record(1, 8, later_s + 1.0)
    assert starts.sure_s(later_s + 1.0) == 0.0


def test_one_stall_among_many_starts_says_nothing() -> None:
    starts, now_s = StartInterval(), 0.0
    starts.record(0, 99, now_s)
    for number in range(12):
        starts.record(1, 99, now_s := now_s + (20.0 if number == 6 else 0.02))
    assert starts.mean_s > 1.5
    assert starts.sure_s(now_s) < 0.1


def test_before_the_first_start_the_prompts_bound_the_wait() -> None:
    queue = QueueAccounting(QueueLimits(max_queue_s=5.0))
    for _ in range(10):
        queue.add(generate([1] * 100, tenant="heavy"))
    pace = QueuePace(prefill_s=10.0)
    assert queue.refusal(generate([1], tenant="heavy"), pace) is not None
    assert queue.refusal(generate([1], tenant="weak"), pace) is None, "its turn comes earlier"
    assert queue.wait_s("weak", pace) == 2.0
