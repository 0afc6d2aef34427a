"""Show the progress of a long run in one line of a terminal; silent without a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

WIDTH: Final = 30
TICK_S: Final = 1.0
CLEAR: Final = "\r\033[K"


@contextmanager
def elapsed(label: str) -> Iterator[None]:
    """Show the seconds since the start, once a second, on a terminal. For a measurement without known progress."""
    if not sys.stderr.isatty():
        yield
        return
    ended = threading.Event()
    begun_s = time.monotonic()

    def tick() -> None:
        while not ended.wait(TICK_S):
            print(f"{CLEAR}{label}: {time.monotonic() - begun_s:.0f} s", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=tick, name="elapsed", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        print(CLEAR, end="", file=sys.stderr, flush=True)


class Progress:
    """Counts towards `total`; `advance` redraws the line."""

    def __init__(self, total: int, label: str = "") -> None:
        self._total = total
        self._label = f"{label} " if label else ""
        self._num_done = 0
        self._started_s = time.monotonic()

    def advance(self) -> None:
        self._num_done += 1
        if not sys.stderr.isatty():
            return
        filled = WIDTH * self._num_done // self._total
        bar = "#" * filled + "-" * (WIDTH - filled)
        elapsed_s = time.monotonic() - self._started_s
        end = "\n" if self._num_done == self._total else ""
        print(f"\r{self._label}[{bar}] {self._num_done}/{self._total} {elapsed_s:.0f} s", end=end, file=sys.stderr)
