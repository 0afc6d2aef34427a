"""A watchdog over the engine thread and its steps."""

from __future__ import annotations

import asyncio
import itertools
import time
from concurrent.futures import Future
from typing import Final

from worker.common.watchdog import end_process
from worker.contracts.mailbox import Mailbox

PING_TICKS: Final = 30
"""Ticks between two pings of the engine thread, which wake it."""


class StepWatchdog:
    """Times the steps: the engine thread writes, other threads read."""

    def __init__(self) -> None:
        self.started_s: float | None = None
        """When the running step was launched, on the monotonic clock; None between steps."""
        self._proved_s = time.monotonic()

    def begin_step(self) -> float:
        """Note that a step runs, and return the time."""
        self.started_s = now_s = time.monotonic()
        return now_s

    def end_step(self, *, failed: bool = False) -> None:
        """Note that the step has ended. Unless it failed, the device works."""
        if not failed:
            self._proved_s = time.monotonic()
        self.started_s = None

    @property
    def idle_s(self) -> float:
        """Seconds since the last proof; 0 within a step."""
        return 0.0 if self.started_s is not None else time.monotonic() - self._proved_s


async def exit_on_hang(mailbox: Mailbox, watchdog: StepWatchdog, max_s: float, tick_s: float = 1.0) -> None:
    """End the process when the engine thread hangs: it cannot be ended by itself, and its clients wait.

    It hangs when one step, or outside steps one command, takes `max_s`. Counts ticks of the event loop, so a process
    that was stopped and continued does not look hung.
    """
    waits_for: float | Future[None] | None = None
    num_ticks, ping = 0, mailbox.call(lambda: None)
    for tick in itertools.count(1):
        await asyncio.sleep(tick_s)
        if ping.done() and tick % PING_TICKS == 0:
            ping = mailbox.call(lambda: None)
        before, waits_for = waits_for, watchdog.started_s or (None if ping.done() else ping)
        num_ticks = num_ticks + 1 if waits_for is not None and waits_for == before else 0
        if num_ticks * tick_s > max_s:
            what = "the engine thread has not answered" if waits_for is ping else "a step has been running"
            end_process(f"headstart worker: {what} for {num_ticks * tick_s:.0f} s: it ends")
