from __future__ import annotations

import asyncio
import gc
import logging
import weakref

import pytest

from server import event_loop
from server.event_loop import BUSY_WINDOW_S, ByteCollector, StreamInterval, keep_running


async def test_task_restarts_after_an_exception(caplog: pytest.LogCaptureFixture) -> None:
    counted: list[str] = []
    errors = iter([ValueError("a"), ValueError("a"), RecursionError("b"), ExceptionGroup("c", [KeyError("d")])])

    async def run() -> None:
        if (error := next(errors, None)) is not None:
            raise error

    with caplog.at_level(logging.ERROR):
        await keep_running("fleet", run, counted.append, pause_s=0.0)
    assert counted == ["fleet"] * 4
    assert len(caplog.records) == 3, "the same error is logged once"


async def test_task_ends_when_cancelled() -> None:
    task = asyncio.create_task(keep_running("fleet", lambda: asyncio.sleep(3600), lambda name: None))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_bytes_of_bodies_bring_a_collection() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.own = self

    gc.collect()
    gc.disable()
    try:
        collector, lost = ByteCollector(max_bytes=1000), weakref.ref(Cycle())
        collector.count(999)
        assert lost() is not None
        collector.count(1)
        assert lost() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("share", "num_tokens"), [(0.0, 1), (0.49, 1), (0.5, 2), (0.67, 3), (0.75, 4), (0.875, 8), (1.0, 8), (1.1, 8)]
)
def test_a_busy_thread_asks_for_more_at_a_time(share: float, num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 0.0, "computed": 0.0}
    monkeypatch.setattr(event_loop.time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(event_loop.time, "thread_time", lambda: clock["computed"])
    interval = StreamInterval()
    clock.update(now=BUSY_WINDOW_S / 2, computed=BUSY_WINDOW_S / 2)
    assert interval.num_tokens() == 1, "it is too early to tell"
    clock.update(now=2 * BUSY_WINDOW_S, computed=2 * BUSY_WINDOW_S * share)
    assert interval.num_tokens() == num_tokens
    clock.update(now=4 * BUSY_WINDOW_S)
    assert interval.num_tokens() == 1, "it has rested since"
