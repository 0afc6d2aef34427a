"""The asynchronous front of the engine thread: commands in, outputs out, and a watchdog over its steps."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Final, TypeVar

from worker.engine.metrics import WorkerMetrics
from worker.engine.protocol import EngineOutput

logger = logging.getLogger(__name__)

PING_TICKS: Final = 30
"""Ticks between two questions to the engine thread, which wake it."""

T = TypeVar("T")
Refuse = Callable[[BaseException], None]


class Mailbox:
    """Commands for the engine thread, in order. `put` and `call` from any thread, `run` and `close` from its own."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[tuple[Callable[[], None], Refuse | None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        """Held while a command is put: none may come in behind `close`."""
        self._closed_by: BaseException | None = None

    def put(self, command: Callable[[], None], refuse: Refuse | None = None) -> None:
        """Queue a command; an exception in it ends the engine. A closed mailbox calls `refuse` instead."""
        with self._lock:
            if (error := self._closed_by) is None:
                self._commands.put((command, refuse))
        if error is not None and refuse is not None:
            refuse(error)

    def call(self, function: Callable[[], T], *, before: Callable[[], object] | None = None) -> Future[T]:
        """Queue a call whose result or exception goes to the future, which always ends.

        `before` runs first, and its exception also ends the engine. A cancelled future skips the call.
        """
        future: Future[T] = Future()

        def fail(error: BaseException) -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

        def run() -> None:
            try:
                if before is not None:
                    before()
            except BaseException as error:
                fail(error)
                raise
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, Exception):
                    raise

        self.put(run, fail)
        return future

    def run(self, *, wait_s: float | None = 0.0) -> None:
        """Run every queued command. With none queued, wait `wait_s` for the first; None waits without limit."""
        with suppress(queue.Empty):
            command, _ = self._commands.get(block=wait_s != 0.0, timeout=wait_s)
            while True:
                command()
                command, _ = self._commands.get_nowait()

    def close(self, error: BaseException) -> None:
        """Refuse all queued and later commands with `error`."""
        with self._lock:
            self._closed_by = error
        while not self._commands.empty():
            _, refuse = self._commands.get_nowait()
            if refuse is not None:
                refuse(error)


class OutputBuffer:
    """Outputs of the engine thread until it has time to deliver them, those of one step together."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._outputs: list[EngineOutput] = []
        self.deliver: Callable[[list[EngineOutput]], object] = lambda outputs: None
        """Set when the engine starts. Returns at once."""

    def put(self, outputs: list[EngineOutput]) -> None:
        self._outputs += outputs

    def flush(self) -> None:
        """Deliver what is buffered."""
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._metrics.count_outputs(outputs)
            self.deliver(outputs)


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
        """Note that the step has ended. Unless it failed, it proves that the device computes."""
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
        """End the process when one step lasts `max_step_s`: its thread cannot be ended, and its clients must know.

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
    """End the process when the engine thread is in no step and runs no command for `max_s`, counted in ticks too."""
    while True:
        await asyncio.sleep(PING_TICKS * tick_s)
        ping, num_ticks = mailbox.call(lambda: None), 0
        while not ping.done():
            await asyncio.sleep(tick_s)
            num_ticks = num_ticks + 1 if watchdog.started_s is None else 0
            if num_ticks * tick_s > max_s:
                logger.critical("the engine thread has not answered for %.0f s: the worker ends", num_ticks * tick_s)
                os._exit(1)
