"""Signs of life of the engine, read by those who watch it from other threads."""

from __future__ import annotations

import time


class Pulse:
    """Written by the engine's thread alone."""

    __slots__ = ("_beat_s", "started_s")

    def __init__(self) -> None:
        self.started_s: float | None = None
        """When the step that runs now was launched, on the monotonic clock; None between steps."""
        self._beat_s = time.monotonic()

    def begin_step(self) -> float:
        """The time of now."""
        self.started_s = now_s = time.monotonic()
        return now_s

    def end_step(self) -> None:
        """The device has just proved that it computes."""
        self._beat_s = time.monotonic()
        self.started_s = None

    def fail_step(self) -> None:
        """It has ended, and proves nothing."""
        self.started_s = None

    @property
    def idle_s(self) -> float:
        """Seconds since the last proof; 0 within a step."""
        return 0.0 if self.started_s is not None else time.monotonic() - self._beat_s

    def running_s(self) -> float:
        """How long the step of now has been running; 0 between steps."""
        started_s = self.started_s
        return 0.0 if started_s is None else time.monotonic() - started_s
