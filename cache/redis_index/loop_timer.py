"""A timer for answers that may already be in the socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

_NUM_ROUNDS: Final = 4
"""Rounds of the event loop in which a reply passes from the socket to who waits for it."""


class LoopTimer:
    """Calls `on_end` after `seconds`, once the running event loop has read what came in this time.

    A loop that had no core for a while runs its timers first. Without some more rounds it would drop answers that came
    in time. They take at most the same time again.
    """

    __slots__ = ("_handle", "_latest_s", "_loop", "_on_end", "_seconds")

    def __init__(self, seconds: float, on_end: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._on_end = on_end
        self._latest_s = 0.0
        self._handle: asyncio.Handle = self._loop.call_later(seconds, self._begin_rounds)

    def cancel(self) -> None:
        self._handle.cancel()

    def _begin_rounds(self) -> None:
        self._latest_s = self._loop.time() + self._seconds
        self._handle = self._loop.call_soon(self._next_round, _NUM_ROUNDS - 1)

    def _next_round(self, num_left: int) -> None:
        if num_left and self._loop.time() < self._latest_s:
            self._handle = self._loop.call_soon(self._next_round, num_left - 1)
        else:
            self._on_end()
