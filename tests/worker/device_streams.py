"""Device streams on a CPU that overlap with the engine, as a GPU does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from tests.waiting import HANG_S

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class LateStream:
    """Does the work when it is collected, as late as possible."""

    overlaps = True

    def enqueue(self, work: Callable[[], T]) -> _Late[T]:
        return _Late(work)


@dataclass(frozen=True)
class _Late(Generic[T_co]):
    work: Callable[[], T_co]

    def is_done(self) -> bool:
        return False

    def collect(self) -> T_co:
        return self.work()


class ThreadedStream:
    """Does the work in a thread. `close` it."""

    overlaps = True

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device")
        self._num_in_flight = 0
        self.max_in_flight = 0
        """The most pieces of work that were queued and not collected at one time."""

    def enqueue(self, work: Callable[[], T]) -> _Queued[T]:
        self._count(1)
        return _Queued(self._thread.submit(work), lambda: self._count(-1))

    def _count(self, step: int) -> None:
        self._num_in_flight += step
        self.max_in_flight = max(self.max_in_flight, self._num_in_flight)

    def close(self) -> None:
        self._thread.shutdown()


@dataclass(frozen=True)
class _Queued(Generic[T_co]):
    future: Future[T_co]
    on_collect: Callable[[], None]

    def is_done(self) -> bool:
        return self.future.done()

    def collect(self) -> T_co:
        self.on_collect()
        return self.future.result(HANG_S)
