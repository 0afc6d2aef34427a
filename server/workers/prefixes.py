"""The prefixes that requests share most, over all workers: the sets in Redis know no parents, the workers' pools do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from cache.records import WorkerMember
from server.workers.client import WorkerLost
from worker.wire import PrefixReport, PrefixUse

MAX_LIMIT: Final = 1000
Ask = Callable[[str, int], Awaitable[PrefixReport]]
"""`WorkerClient.prefixes`: raises WorkerLost."""


@dataclass(frozen=True, slots=True)
class FleetPrefix:
    """One prefix of one model, and who holds it."""

    model: str
    hash: str
    """Of its last block; `path` leads there from the chain's root. 8 bytes in hex."""
    path: tuple[str, ...]
    num_blocks: int
    num_tokens: int
    num_hits: int
    """Requests that found it, on all workers."""
    num_references: int
    """Sequences that hold it now, on all workers."""
    idle_s: float
    """Since it was last used anywhere."""
    workers: tuple[str, ...]
    """Those whose answer names it, by itself or on the way to a longer one, the most hits first."""


@dataclass(frozen=True, slots=True)
class FleetPrefixes:
    prefixes: tuple[FleetPrefix, ...]
    num_cached_blocks: dict[str, int]
    """By worker."""
    errors: dict[str, str]
    """Workers without an answer, and why."""


async def fleet_prefixes(members: Sequence[WorkerMember], ask: Ask, limit: int) -> FleetPrefixes:
    """Ask every worker at once and merge what they answer; those that do not answer are named."""
    reports, errors = await ask_all(members, ask, limit)
    num_cached_blocks = {report.worker_id: report.num_cached_blocks for report in reports}
    return FleetPrefixes(merged(reports, limit), num_cached_blocks, errors)


async def ask_all(members: Sequence[WorkerMember], ask: Ask, limit: int) -> tuple[list[PrefixReport], dict[str, str]]:
    """The reports of those that answer, and why the others did not."""
    answers = await asyncio.gather(*(ask(member.url, limit) for member in members), return_exceptions=True)
    reports: list[PrefixReport] = []
    errors: dict[str, str] = {}
    for member, answer in zip(members, answers, strict=True):
        if isinstance(answer, WorkerLost):
            errors[member.worker_id] = str(answer)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            reports.append(answer)
    return reports, errors


def merged(reports: Sequence[PrefixReport], limit: int) -> tuple[FleetPrefix, ...]:
    """Equal prefixes as one, those first that spared most tokens."""
    found: dict[tuple[str, str], list[tuple[PrefixReport, PrefixUse]]] = {}
    holders: dict[tuple[str, str], dict[str, None]] = {}
    for report in reports:
        for use in report.prefixes:
            found.setdefault((report.model, use.path[-1]), []).append((report, use))
            for above in use.path[1:-1]:  # who holds a prefix holds all of it
                holders.setdefault((report.model, above), {})[report.worker_id] = None
    prefixes = [_joined(uses, holders.get(key, ())) for key, uses in found.items()]
    prefixes.sort(key=lambda prefix: (-prefix.num_hits * prefix.num_tokens, prefix.hash))
    return tuple(prefixes[:limit])


def _joined(uses: list[tuple[PrefixReport, PrefixUse]], holders: Iterable[str]) -> FleetPrefix:
    uses = sorted(uses, key=lambda pair: (-pair[1].num_hits, pair[0].worker_id))
    report, first = uses[0]
    return FleetPrefix(
        model=report.model,
        hash=first.path[-1],
        path=first.path,
        num_blocks=first.num_blocks,
        num_tokens=first.num_blocks * report.block_size,
        num_hits=sum(use.num_hits for _, use in uses),
        num_references=sum(use.num_references for _, use in uses),
        idle_s=min(use.idle_s for _, use in uses),
        workers=tuple(dict.fromkeys((*(report.worker_id for report, _ in uses), *holders))),
    )
