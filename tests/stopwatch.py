"""Seconds of a stretch that are not the machine's fault: for promises in seconds, on a machine that may be busy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.waiting import HANG_S

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Stopwatch:
    """Runs from its making, and stands while a process is ready to run and has no core.

    It counts this process and those of `pids`, which is asked at each reading. Where several wait at once, each counts:
    next to a busy machine the reading is too small, never too large. A product that waits too long is one that sleeps,
    and sleep is read in full.
    """

    def __init__(self, pids: Callable[[], Iterable[int]] = tuple) -> None:
        self._pids = pids
        self._seen: dict[str, float] = {}
        self._waited_s = 0.0
        self._waiting_s()
        self._waited_s = 0.0
        self._began_s = time.monotonic()

    def own_s(self) -> float:
        """Seconds since it was made, without those of waiting for a core."""
        return max(0.0, time.monotonic() - self._began_s - self._waiting_s())

    def wait_until(self, condition: Callable[[], object], own_s: float, what: str | Callable[[], str]) -> float:
        """Wait until the condition holds, at most `own_s` own seconds; return how many it took.

        A condition whose connection is refused does not hold.
        """
        ends_s = time.monotonic() + HANG_S
        begun_s = self.own_s()
        while not _holds(condition):
            is_late = self.own_s() - begun_s > own_s or time.monotonic() > ends_s
            assert not is_late, f"not within {own_s:g} s: {what if isinstance(what, str) else what()}"
            time.sleep(0.02)
        return self.own_s() - begun_s

    def _waiting_s(self) -> float:
        """Return how long threads waited for a core since the start, and the whole machine for its host."""
        readings = {"steal": _steal_s()}
        for pid in {os.getpid(), *self._pids()}:
            for thread in Path(f"/proc/{pid}/task").glob("*"):
                readings[str(thread)] = _run_queue_s(thread)
        for name, seconds in readings.items():
            self._waited_s += max(0.0, seconds - self._seen.get(name, 0.0))
        self._seen |= readings
        return self._waited_s


def _holds(condition: Callable[[], object]) -> bool:
    try:
        return bool(condition())
    except OSError:
        return False


def _run_queue_s(thread: Path) -> float:
    """Return how long it was ready and had no core; 0 when it has ended. Source: sched-stats of the kernel."""
    try:
        return int((thread / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _steal_s() -> float:
    """Return how long the host ran others in this machine's place. Source: proc(5)."""
    return int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8]) * _TICK_S
