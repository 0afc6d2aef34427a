from __future__ import annotations

import asyncio
import gc
import logging
import weakref

import pytest

from server.event_loop import ByteCollector, keep_running


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
