"""Device streams on a CPU that overlap with the engine, as a GPU does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tests.waiting import HANG_S
from worker.contracts.step import Launch

T = TypeVar("T")


class LateStream:
    """Does the work when it is collected, as late as possible."""

    overlaps = True

    def enqueue(self, work: Callable[[], T]) -> Launch[T]:
        return Launch(work, lambda: False)


class ThreadedStream:
    """Does the work in a thread. `close` it."""

    overlaps = True

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device")
        self._num_in_flight = 0
        self.max_in_flight = 0
        """The most pieces of work that were queued and not collected at one time."""

    def enqueue(self, work: Callable[[], T]) -> Launch[T]:
        self._count(1)
        future = self._thread.submit(work)

        def collect() -> T:
            self._count(-1)
            return future.result(HANG_S)

        return Launch(collect, future.done)

    def _count(self, step: int) -> None:
        self._num_in_flight += step
        self.max_in_flight = max(self.max_in_flight, self._num_in_flight)

    def close(self) -> None:
        self._thread.shutdown()
