"""The latest changes, for operators: workers that came, went or failed, and requests that were turned away."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

MAX_CHANGES: Final = 100  # more than a screen has
SAME_S: Final = 60.0  # requests of one kind within a minute are one line
_WORDS: Final = {"dead": "died", "draining": "drains", "broken": "breaker opened", "unreachable": "not reached"}
"""The words for some states that a worker comes into."""


class FeedChanges:
    """Compares snapshots of the fleet. `see` is called with each, also while no page is open."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._workers: dict[str, tuple[str, str, float]] = {}
        """The epoch and the state of each, and since when."""
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
            name, epoch, known = row["worker"], row["epoch"], before.get(row["worker"])
            row["state"] = state = _state(row["state"], None if known is None else known[1])
            is_same = known is not None and known[:2] == (epoch, state)
            row["since"] = known[2] if known is not None and is_same else now
            self._workers[name] = epoch, state, row["since"]
            if not is_same and (what := _what(known, epoch, state)):
                self._add(now, what, row["reason"], worker=name, model=row["model"])
        for name in before.keys() - self._workers.keys():
            if before[name][1] != "unreachable":
                self._add(now, "forgotten", "", worker=name)
        for (what, why), count in counts.items():
            if more := int(count - self._counts.get((what, why), 0)):
                lately = [each for each in self.recent if (each["what"], each["why"]) == (what, why)][-1:]
                if lately and now - lately[0]["at"] <= SAME_S:
                    lately[0] |= {"count": lately[0]["count"] + more, "last": now}
                else:
                    self._add(now, what, why, count=more)
        self._counts = counts

    def _add(self, now: float, what: str, why: str, *, worker: str = "", model: str = "", count: int = 1) -> None:
        change = {"at": now, "last": now, "worker": worker, "model": model, "what": what, "why": why, "count": count}
        self.recent.append(change)


def _state(state: str, before: str | None) -> str:
    if state not in ("lost", "broken"):
        return state
    if before in (None, "joining"):
        return "joining"
    return "broken" if state == "broken" else "left" if before in ("draining", "left") else "dead"


def _what(known: tuple[str, str, float] | None, epoch: str, state: str) -> str:
    """Return the change of a worker; nothing for one that begins to join."""
    if state in ("dead", "left", "draining", "broken", "refused", "unreachable"):
        return _WORDS.get(state, state)
    if known is None or known[1] in ("joining", "unreachable", "refused"):
        return "" if state == "joining" else "joined"
    if known[0] != epoch:  # a live worker does so after a purge, too
        return "restarted" if known[1] in ("dead", "left") else "began a new epoch"
    return "serves" if state == "serving" else state
