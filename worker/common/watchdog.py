"""Ends a process whose event loop is stuck, so that its supervisor restarts it."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import threading
from collections.abc import Iterator
from typing import Final

TICK_S: Final = 1.0  # the loop is woken this often: too seldom to cost anything
MAX_MISSED: Final = 20
"""Ticks in a row without a turn of the loop. The longest work that may hold a loop takes a tenth of that."""
EXIT_CODE: Final = 1  # a failure, after which supervisors start a process again
_STDERR: Final = 2  # the descriptor of standard error


@contextlib.contextmanager
def watched(loop: asyncio.AbstractEventLoop, name: str, *, tick_s: float = TICK_S) -> Iterator[None]:
    """Watch a loop from a thread: end the process when the loop takes no turn for `MAX_MISSED` ticks.

    Ticks are those that the thread itself lives through. So a process that was stopped as a whole does not look hung.
    """
    is_over = threading.Event()
    has_run = threading.Event()

    def watch() -> None:
        num_missed = 0
        has_run.set()
        while not is_over.wait(tick_s):
            if not has_run.is_set():
                num_missed += 1
                if num_missed >= MAX_MISSED:
                    end_process(
                        f"headstart {name}: its event loop has not run for {num_missed * tick_s:.0f} s: it ends"
                    )
                continue
            num_missed = 0
            has_run.clear()
            try:
                loop.call_soon_threadsafe(has_run.set)
            except RuntimeError:  # closed: the process ends
                return

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def end_process(reason: str) -> None:
    """Write the reason and every thread's stack to stderr, and exit. Takes no lock that a hung thread may hold."""
    with contextlib.suppress(OSError):
        is_blocking = os.get_blocking(_STDERR)
        os.set_blocking(_STDERR, False)  # a reader that hangs too must not keep the process
        os.write(_STDERR, f"{reason}\n".encode())
        faulthandler.dump_traceback(_STDERR, all_threads=True)
        os.set_blocking(_STDERR, is_blocking)
    os._exit(EXIT_CODE)
