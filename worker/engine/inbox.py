"""What other threads want of the engine: commands, done in order by its own thread when it has time for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
Refusal = Callable[[BaseException], None]


class Inbox:
    """`put` and `call` from any thread, `run` and `close` from the engine's."""

    __slots__ = ("_closed_by", "_commands", "_lock")

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[tuple[Callable[[], None], Refusal | None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        """Held while a command is put in: none may come in behind `close`."""
        self._closed_by: BaseException | None = None

    def put(self, command: Callable[[], None], refuse: Refusal | None = None) -> None:
        """What `command` raises ends the engine. `refuse` hears, from any thread, that it will not be done."""
        with self._lock:
            if (error := self._closed_by) is None:
                self._commands.put((command, refuse))
        if error is not None and refuse is not None:
            refuse(error)

    def call(self, function: Callable[[], T], *, before: Callable[[], None] | None = None) -> Future[T]:
        """Have `function` called, unless the future is cancelled before. Its error is the future's; that of `before`,
        which is called first, is too, and ends the engine. The future always ends."""
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
        """Do all that has come. Nothing has: wait `wait_s` for it; None: as long as it takes."""
        try:
            command, _ = self._commands.get(block=wait_s != 0.0, timeout=wait_s)
            while True:
                command()
                command, _ = self._commands.get_nowait()
        except queue.Empty:
            return

    def close(self, error: BaseException) -> None:
        """Refuse, with `error`, what has come and what will come: nobody runs commands any more."""
        with self._lock:
            self._closed_by = error
        while not self._commands.empty():
            _, refuse = self._commands.get_nowait()
            if refuse is not None:
                refuse(error)
