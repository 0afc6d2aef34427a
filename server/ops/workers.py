"""A row for every worker that the gateway knows, the lost ones included."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cache.records import Candidate, WorkerMember
from cache.redis_index import RegistryEntry
from cache.types import WorkerId


@dataclass(frozen=True, slots=True, eq=False)
class FleetSources:
    """Where the rows come from; each only looks at what is known."""

    members: Callable[[], Sequence[WorkerMember]]
    """Every worker heard of lately."""
    candidates: Callable[[], Sequence[Candidate]]
    """The live ones."""
    broken: Callable[[WorkerId], bool]
    entries: Callable[[], Sequence[RegistryEntry]]
    """The registry as last seen."""
    hit_rate: Callable[[WorkerId], float | None]


def worker_rows(sources: FleetSources) -> list[dict[str, Any]]:
    """Sorted by model and name. `state`: serving, draining, broken (requests failed just now) or lost."""
    live = {candidate.member.worker_id: candidate for candidate in sources.candidates()}
    entries = {entry.member.worker_id: entry for entry in sources.entries()}
    members = sorted(sources.members(), key=lambda member: (member.model, _natural(member.worker_id)))
    return [_row(member, live.get(member.worker_id), entries, sources) for member in members]


def _row(
    member: WorkerMember,
    candidate: Candidate | None,
    entries: Mapping[WorkerId, RegistryEntry],
    sources: FleetSources,
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "worker": member.worker_id,
        "model": member.model,
        "epoch": member.epoch,
        "url": member.url,
        "numerics": member.numerics,
        "block_size": member.block_size,
        "max_model_len": member.max_model_len,
        "state": "lost",
        "hit_rate": sources.hit_rate(member.worker_id),
        "lease_left_s": None,
        "published_blocks": None,
        "load": None,
    }
    entry = entries.get(member.worker_id)
    if entry is not None and entry.member.epoch == member.epoch:
        row["lease_left_s"] = entry.lease_left_s
        row["published_blocks"] = entry.num_entries
    if candidate is None:
        return row
    load = candidate.load
    row["state"] = "draining" if load.draining else "broken" if sources.broken(member.worker_id) else "serving"
    row["load"] = {
        "running": load.num_running,
        "waiting": load.num_waiting,
        "queued_s": sum(load.queued_prefill_s.values()),
        "prefill_tokens_per_s": load.prefill_tokens_per_s,
        "blocks": load.num_blocks,
        "free_blocks": load.num_free_blocks,
        "age_s": candidate.load_age_s,
    }
    return row


def _natural(name: str) -> tuple[str, int]:
    """worker-2 before worker-10."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or -1)
