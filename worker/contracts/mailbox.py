"""Commands for the engine thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")
Refuse = Callable[[BaseException], None]


class Mailbox:
    """Commands for the engine thread, in order. Any thread calls `put` and `call`, only that one `run` and `close`."""

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

    def call(self, function: Callable[[], T], *, before: Callable[[], object] = lambda: None) -> Future[T]:
        """Queue a call whose result or exception goes to the future, which always ends.

        `before` runs first: no step comes between, and its exception also ends the engine. A cancelled call is skipped.
        """
        future: Future[T] = Future()

        def fail(error: BaseException) -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

        def run() -> None:
            try:
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
