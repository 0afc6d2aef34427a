"""The way of one answer in stages, from the marks of gateway and worker and the client's own times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

STAGES: Final = (
    ("read", "read"),
    ("validate", "checked"),
    ("template", "rendered"),
    ("tokens", "tokenised"),
    ("hash", "asked"),
    ("lookup", "found"),
    ("choice", "placed"),
    ("send", "sent"),
    ("to worker", "arrived"),
    ("to engine", "queued"),
    ("queue", "launched"),
    ("step", "stepped"),
    ("to loop", "dispatched"),
    ("frame", "framed"),
    ("to gateway", "frames"),
    ("SSE", "written"),
    ("client", "received"),
)
"""Each stage, and the moment at which it ends. The next begins there."""
_LAST: Final = frozenset({"stepped", "dispatched", "framed", "frames", "written"})
"""Moments that come several times before the first token: of them the last one counts."""


@dataclass(slots=True)
class Walk:
    """The seconds of one answer up to its first token, by stage."""

    total_s: float
    stages: Mapping[str, float]

    @property
    def left_s(self) -> float:
        """Return the time that no stage explains."""
        return self.total_s - sum(self.stages.values())


def walk(begun_s: float, received_s: float, marks: Iterable[tuple[str, float]]) -> Walk:
    """Return the stages between two times of the client. Without both of its moments, a stage is left out."""
    times: dict[str, float] = {"received": received_s}
    for name, noted_s in sorted(marks, key=lambda mark: mark[1]):
        if begun_s <= noted_s <= received_s and (name in _LAST or name not in times):
            times[name] = noted_s
    before_s, is_known, stages = begun_s, True, dict[str, float]()
    for stage, name in STAGES:
        at_s = times.get(name)
        if at_s is None or at_s < before_s:
            is_known = False
            continue
        if is_known:
            stages[stage] = at_s - before_s
        before_s, is_known = at_s, True
    return Walk(received_s - begun_s, stages)
