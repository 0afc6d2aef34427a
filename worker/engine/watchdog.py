"""A watchdog over the steps of the engine thread."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import Final

from worker.contracts.mailbox import Mailbox

logger = logging.getLogger(__name__)

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

    def running_s(self) -> float:
        """Seconds since the running step was launched; 0 between steps."""
        started_s = self.started_s
        return 0.0 if started_s is None else time.monotonic() - started_s

    async def exit_on_hang(self, max_step_s: float, tick_s: float = 1.0) -> None:
        """End the process when one step lasts `max_step_s`: its thread cannot be ended, and its clients wait.

        Counts ticks of the event loop, so a process that was stopped and continued does not look hung.
        """
        step_started_s, num_ticks = None, 0
        while True:
            await asyncio.sleep(tick_s)
            same = self.started_s is not None and self.started_s == step_started_s
            num_ticks = num_ticks + 1 if same else 0
            step_started_s = self.started_s
            if num_ticks * tick_s > max_step_s:
                logger.critical("a step has been running for %.0f s: the worker ends", num_ticks * tick_s)
                os._exit(1)


async def exit_on_silence(mailbox: Mailbox, watchdog: StepWatchdog, max_s: float, tick_s: float = 1.0) -> None:
    """End the process when the engine thread, outside a step, runs no command for `max_s`. Counts ticks too."""
    while True:
        await asyncio.sleep(PING_TICKS * tick_s)
        ping, num_ticks = mailbox.call(lambda: None), 0
        while not ping.done():
            await asyncio.sleep(tick_s)
            num_ticks = num_ticks + 1 if watchdog.started_s is None else 0
            if num_ticks * tick_s > max_s:
                logger.critical("the engine thread has not answered for %.0f s: the worker ends", num_ticks * tick_s)
                os._exit(1)
