"""Sharing the event loop: long work in slices, background tasks that are restarted, and the delay of the loop.

Long work is a generator: at each `yield` it may rest. `run_sliced` gives the loop a turn whenever a slice is used up,
`run_now` runs the work without a pause. A thread would not help: Python code holds the GIL there too.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable
from typing import Any, Final, TypeVar

log = logging.getLogger(__name__)

SLICE_S: Final = 0.005  # other requests wait this long for one that is prepared
SAMPLE_S: Final = 0.01  # thousands in a minute show its p99
BUSY_WINDOW_S: Final = 1.0  # a few long requests do not make a thread busy
MAX_STREAM_INTERVAL: Final = 8  # at 20 ms a token, text comes six times a second
RESTART_PAUSE_S: Final = 1.0  # a task that always fails takes little time of the loop
COLLECTED_BYTES: Final = 256 << 20
"""A collection takes some milliseconds; these bytes take a second to arrive and be read."""

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that yields often, and returns its result."""


class TimeSlice:
    """The slices of one piece of work."""

    __slots__ = ("_until_s",)

    def __init__(self) -> None:
        self._until_s = time.perf_counter() + SLICE_S

    async def rest(self) -> None:
        """Yield to other tasks if the slice is used up."""
        if time.perf_counter() >= self._until_s:
            await asyncio.sleep(0)
            self._until_s = time.perf_counter() + SLICE_S


async def sliced(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield the items. Rest between two of them when the slice is used up."""
    time_slice = TimeSlice()
    for item in items:
        yield item
        await time_slice.rest()


async def run_sliced(steps: Steps[T]) -> T:
    """Return the result of `steps`, run slice by slice."""
    time_slice = TimeSlice()
    try:
        while True:
            next(steps)
            await time_slice.rest()
    except StopIteration as end:
        result: T = end.value
        return result


def run_now(steps: Steps[T]) -> T:
    """Return the result of `steps`, run without a rest."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        result: T = end.value
        return result


class ByteCollector:
    """Runs the garbage collector after `max_bytes` of bodies: by itself it only counts objects.

    Requests leave no cycles. If one does, its body is freed before many others arrive.
    """

    __slots__ = ("_max_bytes", "_num_bytes")

    def __init__(self, max_bytes: int = COLLECTED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes >= self._max_bytes:
            self._num_bytes = 0
            gc.collect()


async def keep_running(
    name: str,
    run: Callable[[], Coroutine[Any, Any, None]],
    count: Callable[[str], None],
    *,
    pause_s: float = RESTART_PAUSE_S,
) -> None:
    """Run `run()` again after a pause whenever it raises, until it returns or is cancelled.

    Call `count(name)` for each failure, and log its traceback when it differs from the failure before.
    """
    last = ""
    while True:
        try:
            await run()
            return
        except Exception as error:
            count(name)
            reason = f"{type(error).__name__}: {error!s:.200}"
            if reason != last:
                log.exception("task %s failed and starts again in %g s", name, pause_s)
                last = reason
        await asyncio.sleep(pause_s)


class StreamInterval:
    """The tokens for which a stream is worth an event: more, the more of its time this thread computes."""

    def __init__(self) -> None:
        self._marked_s, self._computed_s = time.monotonic(), time.thread_time()
        self._num_tokens = 1

    def num_tokens(self) -> int:
        """Return 1 for a thread that rests half of the time, and MAX_STREAM_INTERVAL for one that hardly rests."""
        now_s, computed_s = time.monotonic(), time.thread_time()
        if (elapsed_s := now_s - self._marked_s) >= BUSY_WINDOW_S:
            resting = max(1 / MAX_STREAM_INTERVAL, 1 - (computed_s - self._computed_s) / elapsed_s)
            self._num_tokens = int(1 / resting)
            self._marked_s, self._computed_s = now_s, computed_s
        return self._num_tokens


async def sample_delay(observe: Callable[[float], None]) -> None:
    """Observe how late the loop wakes this task. Never returns."""
    while True:
        due_s = time.monotonic() + SAMPLE_S
        await asyncio.sleep(SAMPLE_S)
        observe(max(0.0, time.monotonic() - due_s))
