"""Long work on the event loop in slices, and how long the loop keeps others waiting.

Work is a generator: each `yield` is a place where it may rest. `paced` gives the loop a turn whenever a slice is used
up, `at_once` runs it through. A thread would be no help: Python code holds the GIL there too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from typing import Final, TypeVar

SLICE_S: Final = 0.005
SAMPLE_S: Final = 0.01

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that yields often, and returns its result."""


class Pace:
    """One piece of work's use of the loop."""

    __slots__ = ("_until_s",)

    def __init__(self) -> None:
        self._until_s = time.perf_counter() + SLICE_S

    async def rest(self) -> None:
        """Let others run if the slice is used up."""
        if time.perf_counter() >= self._until_s:
            await asyncio.sleep(0)
            self._until_s = time.perf_counter() + SLICE_S


async def paced(steps: Steps[T]) -> T:
    """The result of `steps`, slice by slice."""
    pace = Pace()
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        await pace.rest()


def at_once(steps: Steps[T]) -> T:
    """The result of `steps`, without a rest."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


async def sample_delay(observe: Callable[[float], None]) -> None:
    """For ever: tell how much later than asked for the loop wakes this task."""
    while True:
        due_s = time.monotonic() + SAMPLE_S
        await asyncio.sleep(SAMPLE_S)
        observe(max(0.0, time.monotonic() - due_s))
