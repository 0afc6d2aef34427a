"""What the shared index says of each worker, as JSON: for `GET /index` and `headstart index`."""

from __future__ import annotations

from typing import Any

from cache.redis_index import RedisDownError, RedisIndex, RegistryEntry
from server.errors import NotFoundError, UnavailableError


async def index_report(index: object) -> dict[str, Any]:
    """The registry, read now. Raises NotFoundError without a Redis, UnavailableError when it does not answer."""
    if not isinstance(index, RedisIndex):
        raise NotFoundError("This gateway has no Redis (--redis URL), so there is no shared index.")
    try:
        entries = await index.entries()
    except RedisDownError as error:
        raise UnavailableError(f"Redis does not answer: {error}.") from error
    return {"workers": [described(entry) for entry in entries]}


def described(entry: RegistryEntry) -> dict[str, Any]:
    """One worker, live or lapsed, and the blocks that it holds."""
    member, load = entry.member, entry.load
    return {
        "worker_id": member.worker_id,
        "model": member.model,
        "url": member.url,
        "epoch": member.epoch,
        "generation": entry.generation,
        "blocks": entry.num_entries,
        "tokens": entry.num_entries * member.block_size,
        "lease_left_s": round(entry.lease_left_s, 3),
        "lease_age_s": round(entry.age_s, 3),
        "live": entry.lease_left_s > 0,
        "draining": load.draining,
        "running": load.num_running,
        "waiting": load.num_waiting,
    }
