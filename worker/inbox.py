"""What other threads want of the engine: commands, done in order by its own thread when it has time for them."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Inbox:
    """`put` and `call` from any thread, `run` from the engine's."""

    __slots__ = ("_commands",)

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def put(self, command: Callable[[], None]) -> None:
        """What `command` raises ends the engine."""
        self._commands.put(command)

    def call(self, function: Callable[[], T], *, before: Callable[[], None] | None = None) -> Future[T]:
        """Have `function` called, unless the future is cancelled before. Its error is the future's; that of `before`,
        which is called first, ends the engine."""
        future: Future[T] = Future()

        def run() -> None:
            if before is not None:
                before()
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self.put(run)
        return future

    def run(self, *, wait_s: float | None = 0.0) -> None:
        """Do all that has come. Nothing has: wait `wait_s` for it; None: as long as it takes."""
        try:
            command = self._commands.get(block=wait_s != 0.0, timeout=wait_s)
            while True:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return
