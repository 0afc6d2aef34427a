"""The tree of the prefixes that requests share most, for people: who holds which, from the workers' own pools.

    system prompt, 1,360 tokens       worker-0 worker-1        each row adds to the one above it
    +-- a conversation, 2,912         worker-0
    +-- another, 4,000                worker-1

A worker builds its part from its whole pool, which takes it a moment. So each is asked seldom, the less often the more
it holds, and a large fleet in turn; in between its last report counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from cache.records import WorkerMember
from cache.types import Epoch, WorkerId
from server.workers.prefixes import Ask, FleetPrefix, ask_all, merged
from worker.wire import PrefixReport

MAX_STEMS: Final = 16
"""Rows of the tree."""
MAX_HOLDERS: Final = 6
"""Named in a row; the rest are counted."""
LIMIT: Final = 24
"""Prefixes asked of each worker: more than are shown, so that a shared one is seen wherever it is held."""
MAX_ASKED: Final = 32
"""Workers asked at once."""
MIN_AGE_S: Final = 3.0
AGE_S_PER_BLOCK: Final = 1e-4
"""A pool of 100,000 cached blocks is asked every 13 s."""


class StemWatch:
    """Keeps the last report of every live worker. `look` is called by one task."""

    def __init__(self, members: Callable[[], Sequence[WorkerMember]], ask: Ask, clock: Callable[[], float]) -> None:
        self._members = members
        self._ask = ask
        self._clock = clock
        self._reports: dict[WorkerId, PrefixReport] = {}
        self._asked_s: dict[tuple[WorkerId, Epoch], float] = {}

    async def look(self) -> dict[str, Any]:
        """Ask those whose turn it is; the tree as it is then known, parents before children."""
        members = self._members()
        live = {(member.worker_id, member.epoch) for member in members}
        self._asked_s = {key: asked_s for key, asked_s in self._asked_s.items() if key in live}
        due = self._due(members)
        for member in due:
            self._asked_s[member.worker_id, member.epoch] = self._clock()
        reports, errors = await ask_all(due, self._ask, LIMIT)
        self._reports.update((WorkerId(report.worker_id), report) for report in reports)
        self._reports = {
            worker_id: report
            for worker_id, report in self._reports.items()
            if (worker_id, report.epoch) in live and worker_id not in errors
        }
        return {
            "stems": tree(merged(list(self._reports.values()), MAX_STEMS)),
            "num_workers": len(members),
            "num_told": len(self._reports),
        }

    def _due(self, members: Sequence[WorkerMember]) -> list[WorkerMember]:
        """Those not asked for long enough, the longest first."""
        now_s = self._clock()

        def age_s(member: WorkerMember) -> float:
            return now_s - self._asked_s.get((member.worker_id, member.epoch), float("-inf"))

        def is_due(member: WorkerMember) -> bool:
            report = self._reports.get(member.worker_id)
            return age_s(member) >= MIN_AGE_S + AGE_S_PER_BLOCK * (report.num_cached_blocks if report else 0)

        return sorted(filter(is_due, members), key=age_s, reverse=True)[:MAX_ASKED]


def tree(prefixes: Sequence[FleetPrefix]) -> list[dict[str, Any]]:
    """Rows in the order of a drawn tree, siblings by the tokens that they spared; `parent` is the nearest row above."""
    known = {(prefix.model, prefix.hash) for prefix in prefixes}
    children: dict[tuple[str, str | None], list[FleetPrefix]] = {}
    for prefix in prefixes:  # come sorted
        children.setdefault((prefix.model, _parent(prefix, known)), []).append(prefix)
    rows: list[dict[str, Any]] = []

    def add(model: str, parent: str | None, level: int) -> None:
        for prefix in children.get((model, parent), ()):
            rows.append(_row(prefix, parent, level))
            add(model, prefix.hash, level + 1)

    for model in dict.fromkeys(prefix.model for prefix in prefixes):
        add(model, None, 1)
    return rows


def _parent(prefix: FleetPrefix, known: set[tuple[str, str]]) -> str | None:
    return next((above for above in reversed(prefix.path[:-1]) if (prefix.model, above) in known), None)


def _row(prefix: FleetPrefix, parent: str | None, level: int) -> dict[str, Any]:
    return {
        "hash": prefix.hash,
        "parent": parent,
        "level": level,
        "model": prefix.model,
        "num_tokens": prefix.num_tokens,
        "num_hits": prefix.num_hits,
        "num_references": prefix.num_references,
        "idle_s": prefix.idle_s,
        "workers": sorted(prefix.workers[:MAX_HOLDERS]),
        "num_workers": len(prefix.workers),
    }
