"""EventSubscriber over real sockets: lost batches, restarts, either order of starting, and frames that are none."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.waiting import until
from tests.worker.adapter.fake_publisher import FakePublisher
from worker.adapter.api import EventSource
from worker.adapter.kv_events import EventBatch
from worker.adapter.subscriber import EventSubscriber, check_endpoint, engine_binds


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
def replay(folder: Path) -> str:
    return f"ipc://{folder}/replay"


def free_endpoint() -> str:
    """An address on which no process listens: an engine connects to it."""
    with zmq.Context() as context, context.socket(zmq.PUB) as probe:
        return f"tcp://127.0.0.1:{probe.bind_to_random_port('tcp://127.0.0.1')}"


@pytest.fixture(params=["the engine connects", "the engine binds"])
def endpoint(request: pytest.FixtureRequest, folder: Path) -> str:
    return free_endpoint() if request.param == "the engine connects" else f"ipc://{folder}/events"


class Log:
    """Records the calls of a subscriber, with batches as their times: 1 for the first one after 1000."""

    def __init__(self) -> None:
        self.said: list[int | str] = []
        self.counts: Counter[str] = Counter()

    def hear(self, event: str, batch: EventBatch | None) -> None:
        self.counts[event] += 1
        if batch is not None:
            self.said.append(round(batch.ts - 1000))
        elif event in ("gap", "restart"):
            self.said.append(event)


@asynccontextmanager
async def following(
    endpoint: str, replay: str | None, log: Log, *, topic: str = "kv", **settings: Any
) -> AsyncIterator[EventSubscriber]:
    subscriber = EventSubscriber(
        EventSource(endpoint, replay, topic),
        log.hear,
        **{"idle_s": 0.02, "replay_timeout_s": 60.0} | settings,
    )
    running = asyncio.create_task(subscriber.run())
    try:
        yield subscriber
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        subscriber.close()


async def said(log: Log, *expected: int | str) -> None:
    await until(lambda: len(log.said) >= len(expected))
    assert log.said == list(expected)


async def test_batches_arrive_in_order(endpoint: str, replay: str) -> None:
    log = Log()
    with FakePublisher(endpoint, replay) as engine:
        async with following(endpoint, replay, log) as subscriber:
            await until(engine.is_subscribed)
            for _ in range(100):
                engine.publish()
            await said(log, *range(1, 101))
            assert log.counts["batch"] == 100
            assert not subscriber.is_silent
            assert not log.counts["gap"] + log.counts["restart"] + log.counts["bad"]


@pytest.mark.parametrize("replays_topic", [True, False])
async def test_lost_batches_come_by_replay(endpoint: str, replay: str, replays_topic: bool) -> None:
    log = Log()
    with FakePublisher(endpoint, replay, replays_topic=replays_topic) as engine:
        async with following(endpoint, replay, log, idle_s=60.0):
            await until(engine.is_subscribed)
            await until(lambda: engine.num_questions)
            for number in range(50):
                engine.publish(lost=number % 7 in (2, 3))
            await said(log, *range(1, 51))
            assert log.counts["gap"] == 0


async def test_holes_in_a_long_replay_are_asked_for_again(endpoint: str, replay: str) -> None:
    log = Log()
    with FakePublisher(endpoint, replay, drops_every=10) as engine:
        for _ in range(50):
            engine.publish(lost=True)
        async with following(endpoint, replay, log):  # a hole at the very end is seen when it asks again
            await said(log, *range(1, 51))
            assert log.counts["gap"] == 0


async def test_the_last_batch_of_an_idle_engine_is_fetched(endpoint: str, replay: str) -> None:
    """With the default of 0.5 s, the engine's answer is all that is left of the second that is promised."""
    log = Log()
    with FakePublisher(endpoint, replay) as engine:
        async with following(endpoint, replay, log, idle_s=0.5):
            await until(engine.is_subscribed)
            engine.publish()
            await said(log, 1)
            await until(lambda: engine.num_questions >= 2)
            engine.publish(lost=True)
            asked = engine.num_questions
            await said(log, 1, 2)
            assert engine.num_questions <= asked + 1


async def test_at_the_start_what_the_engine_has_comes_by_replay(endpoint: str, replay: str) -> None:
    log = Log()
    with FakePublisher(endpoint, replay) as engine:
        for _ in range(5):
            engine.publish(lost=True)
        async with following(endpoint, replay, log):
            await said(log, 1, 2, 3, 4, 5)


async def test_a_replay_that_begins_too_late_is_a_gap(endpoint: str, replay: str) -> None:
    log = Log()
    with FakePublisher(endpoint, replay, num_buffered=3) as engine:
        for _ in range(5):
            engine.publish(lost=True)
        async with following(endpoint, replay, log, idle_s=60.0):
            await said(log, "gap", 3, 4, 5)
            await until(engine.is_subscribed)
            for number in range(5, 10):
                engine.publish(lost=number < 9)
            await said(log, "gap", 3, 4, 5, "gap", 8, 9, 10)


async def test_without_a_replay_a_lost_batch_is_a_gap(endpoint: str) -> None:
    log = Log()
    with FakePublisher(endpoint) as engine:
        async with following(endpoint, None, log):
            await until(engine.is_subscribed)
            for number in range(6):
                engine.publish(lost=number in (2, 3))
            await said(log, 1, 2, "gap", 5, 6)


async def test_a_replay_without_an_answer_is_counted_and_nothing_more(endpoint: str, replay: str) -> None:
    log = Log()
    with FakePublisher(endpoint, replay, answers=False) as engine:
        async with following(endpoint, replay, log, replay_timeout_s=0.01, silent_s=0.0) as subscriber:
            await until(lambda: log.counts["unanswered"] >= 3)
            assert subscriber.is_silent
            assert log.said == []
            await until(engine.is_subscribed)
            engine.publish(lost=True)
            engine.publish()
            await said(log, "gap", 2)
            engine.answers = True
            engine.publish(lost=True)
            await until(lambda: 3 in log.said)
            assert log.said == ["gap", 2, 3]


@pytest.mark.parametrize("has_replay", [True, False])
async def test_a_restart_is_seen_when_numbers_begin_again(endpoint: str, replay: str, has_replay: bool) -> None:
    log = Log()
    address = replay if has_replay else None
    async with following(endpoint, address, log, idle_s=60.0):
        with FakePublisher(endpoint, address) as engine:
            await until(engine.is_subscribed)
            for _ in range(5):
                engine.publish()
            await said(log, 1, 2, 3, 4, 5)
        with FakePublisher(endpoint, address, begin_ts=1100.0) as engine:
            await until(engine.is_subscribed)
            engine.publish(lost=True)
            engine.publish()
            await said(log, 1, 2, 3, 4, 5, "restart", *((101, 102) if has_replay else ("gap", 102)))


@pytest.mark.parametrize("num_published", [0, 2, 5, 9])
async def test_a_restart_is_seen_also_while_the_engine_is_idle(endpoint: str, replay: str, num_published: int) -> None:
    """The clocks do not matter."""
    log = Log()
    async with following(endpoint, replay, log, replay_timeout_s=0.5):
        with FakePublisher(endpoint, replay) as engine:
            await until(engine.is_subscribed)
            for _ in range(5):
                engine.publish()
            await said(log, 1, 2, 3, 4, 5)
        with FakePublisher(endpoint, replay, begin_ts=500.0) as engine:
            for _ in range(num_published):
                engine.publish(lost=True)
            later = range(-499, -499 + num_published)
            await until(lambda: log.counts["restart"] and log.counts["batch"] >= 5 + num_published)
            first = log.said.index("restart")
            assert log.said[:first] == [1, 2, 3, 4, 5]
            assert log.said[-num_published or len(log.said) :] == list(later)


async def test_either_side_may_start_first(endpoint: str, replay: str) -> None:
    log = Log()
    async with following(endpoint, replay, log, replay_timeout_s=0.05):
        await until(lambda: log.counts["unanswered"])
        with FakePublisher(endpoint, replay) as engine:
            await until(engine.is_subscribed)
            engine.publish()
            await said(log, 1)


async def test_after_its_own_restart_it_has_the_same_port(endpoint: str, replay: str) -> None:
    with FakePublisher(endpoint, replay) as engine:
        for num_published in range(1, 4):
            log = Log()
            async with following(endpoint, replay, log):
                engine.publish()
                await said(log, *range(1, num_published + 1))


async def test_a_taken_port_is_an_error() -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.bind_to_random_port('tcp://127.0.0.1')}"
        with pytest.raises(OSError, match=r"127\.0\.0\.1.*in use"):
            async with following(endpoint, None, Log()):
                await until(lambda: False, timeout_s=0.1)


@pytest.mark.parametrize("payload", [b"", b"\xc1garbage", b"\x91" * 10_000, b"\xdd\xff\xff\xff\xff"])
async def test_a_bad_payload_is_a_gap(endpoint: str, replay: str, payload: bytes) -> None:
    log = Log()
    with FakePublisher(endpoint, replay) as engine:
        async with following(endpoint, replay, log):
            await until(engine.is_subscribed)
            engine.publish()
            engine.publish(payload=payload)
            engine.publish()
            await said(log, 1, "gap", 3)
            assert log.counts["bad"] == 1


async def test_bad_frames_are_dropped(endpoint: str, replay: str) -> None:
    log = Log()
    with FakePublisher(endpoint, replay) as engine:
        async with following(endpoint, replay, log):
            await until(engine.is_subscribed)
            engine.publish()
            engine.send(b"kv")
            engine.send(b"kv", b"7", b"")
            engine.send(b"kv", b"", b"", b"")
            engine.send(b"kv2", (1).to_bytes(8, "big"), b"another topic")
            engine.publish()
            await said(log, 1, 2)
            assert log.counts["bad"] == 3


async def test_without_a_topic_every_one_is_read(endpoint: str, replay: str) -> None:
    log = Log()
    with FakePublisher(endpoint, replay, topic="kv") as engine:
        async with following(endpoint, replay, log, topic=""):
            await until(engine.is_subscribed)
            engine.publish()
            await said(log, 1)


async def test_a_number_from_nowhere_is_a_gap_and_then_a_restart(endpoint: str, replay: str) -> None:
    log = Log()
    with FakePublisher(endpoint, replay) as engine:
        async with following(endpoint, replay, log, idle_s=60.0):
            await until(engine.is_subscribed)
            engine.publish()
            engine.send(b"kv", b"\xff" * 8, b"")
            await said(log, 1, "gap", "gap")
            engine.publish()
            await said(log, 1, "gap", "gap", "restart", 1, 2)


@pytest.mark.parametrize(
    ("endpoint", "binds"),
    [
        ("tcp://127.0.0.1:5557", False),
        ("tcp://0.0.0.0:5557", False),
        ("tcp://*:5557", True),
        ("tcp://[::1]:5557", True),
        ("ipc:///run/events", True),
    ],
)
def test_which_side_binds_is_as_vllm_decides(endpoint: str, binds: bool) -> None:
    assert engine_binds(EventSource(endpoint, None)) is binds


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://10.1.2.3:5557", "tcp://host:5557"])
def test_endpoints_that_others_reach_must_be_wanted(endpoint: str) -> None:
    with pytest.raises(ValueError, match="--events-exposed"):
        check_endpoint(endpoint, exposed=False)
    check_endpoint(endpoint, exposed=True)


@pytest.mark.parametrize("endpoint", ["", "5557", "tcp://127.0.0.1", "tcp://127.0.0.1:http", "inproc://x", "udp://a:1"])
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"tcp://|Port"):
        check_endpoint(endpoint, exposed=True)


def test_a_socket_in_a_folder_that_others_enter_must_be_wanted(folder: Path) -> None:
    check_endpoint(f"ipc://{folder}/events", exposed=False)
    folder.chmod(0o755)
    check_endpoint(f"ipc://{folder}/events", exposed=True)
    with pytest.raises(ValueError, match="0700"):
        check_endpoint(f"ipc://{folder}/events", exposed=False)
    with pytest.raises(ValueError, match="no folder"):
        check_endpoint(f"ipc://{folder}/none/events", exposed=False)
