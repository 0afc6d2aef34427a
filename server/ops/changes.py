"""What has happened lately, for operators: workers that came, went or failed, and requests that were turned away."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

MAX_CHANGES: Final = 100  # more than a screen has
SAME_S: Final = 60.0  # requests of one kind within a minute are one line
_WORDS: Final = {
    "dead": "died",
    "left": "left after its drain",
    "draining": "drains",
    "broken": "breaker opened",
    "refused": "refused",
    "unreachable": "not reached",
}
"""What is said of a worker that comes into a state."""


class Seen(Struct, frozen=True):
    """A worker as it was last seen."""

    epoch: str
    state: str
    since: float
    """Unix time."""


class Changes:
    """Compares what it is shown with what it was shown before. `see` is called whether somebody looks or not."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._workers: dict[str, Seen] = {}
        self._counts: Mapping[tuple[str, str], float] = {}
        self.recent: deque[dict[str, Any]] = deque(maxlen=MAX_CHANGES)
        """The latest last."""

    def see(self, rows: Sequence[dict[str, Any]], counts: Mapping[tuple[str, str], float]) -> None:
        """Take the workers' rows, and requests since the start by what became of them and why.

        A row gets `since`. `lost` becomes `joining` before a worker has served, `left` after its drain, else `dead`.
        """
        now = self._clock()
        before, self._workers = self._workers, {}
        for row in rows:
            name, epoch = row["worker"], row["epoch"]
            known = before.get(name)
            row["state"] = state = _state(row["state"], known)
            is_same = known is not None and (known.epoch, known.state) == (epoch, state)
            seen = known if known is not None and is_same else Seen(epoch, state, now)
            self._workers[name], row["since"] = seen, seen.since
            if not is_same and (what := _what(known, seen)):
                self._add(now, what, row["reason"], worker=name, model=row["model"])
        for name in before.keys() - self._workers.keys():
            if before[name].state != "unreachable":
                self._add(now, "forgotten", "", worker=name)
        for kind, count in counts.items():
            if more := count - self._counts.get(kind, 0.0):
                self._count(now, *kind, int(more))
        self._counts = counts

    def _add(self, now: float, what: str, why: str, *, worker: str = "", model: str = "", count: int = 1) -> None:
        change = {"at": now, "last": now, "worker": worker, "model": model, "what": what, "why": why, "count": count}
        self.recent.append(change)

    def _count(self, now: float, what: str, why: str, count: int) -> None:
        for change in reversed(self.recent):
            if now - change["at"] > SAME_S:
                break
            if (change["what"], change["why"]) == (what, why):
                change["count"] += count
                change["last"] = now
                return
        self._add(now, what, why, count=count)


def _state(state: str, known: Seen | None) -> str:
    if state not in ("lost", "broken"):
        return state
    if known is None or known.state == "joining":
        return "joining"
    if state == "broken":
        return state
    return "left" if known.state in ("draining", "left") else "dead"


def _what(known: Seen | None, seen: Seen) -> str:
    """Return what has happened to a worker, or nothing if it only begins to join."""
    if what := _WORDS.get(seen.state):
        return what
    if known is None or known.state in ("joining", "unreachable", "refused"):
        return "" if seen.state == "joining" else "joined"
    return "restarted" if known.epoch != seen.epoch else "serves again" if seen.state == "serving" else seen.state
