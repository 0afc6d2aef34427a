"""The gateway's side of the shared index: one round trip per decision, within a deadline, or None."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cache.records import Candidate, WorkerMember
from cache.redis_index import schema
from cache.redis_index.link import LinkDownError
from cache.redis_index.registry import RegistryEntry
from cache.redis_index.shard import MAX_BLOCKS, ReaderSettings, Shard
from cache.types import HASH_BYTES, BlockHash

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShardHealth:
    """Whether lookups reach one shard."""

    redis: str
    """Its address, without a password."""
    connected: bool
    breaker_open: bool


class RedisIndex:
    """`cache.records.PrefixIndex` over Redis. Needs `run()` in the event loop of its callers."""

    def __init__(
        self, url: str, settings: ReaderSettings | None = None, *, count: Callable[[str], None] = lambda event: None
    ) -> None:
        """`count(event)` feeds the metrics: timeout, down, skipped, invalid, stale, breaker_opened, breaker_closed."""
        self._settings = settings = settings or ReaderSettings()
        schema.check_key_part("key prefix", settings.prefix)
        self._count = count
        self._shards = [Shard(url, number, settings, count) for number in range(settings.num_shards)]

    async def run(self) -> None:
        """Keep the connections and what is known of the registry; ends only by cancellation."""
        async with asyncio.TaskGroup() as group:
            for shard in self._shards:
                group.create_task(shard.link.run())
                group.create_task(shard.probe())

    async def lookup(self, hashes: Sequence[BlockHash], model: str | None = None) -> list[Candidate] | None:
        """See `PrefixIndex`. Several shards are read in parallel; those that fail contribute no candidate."""
        blob = b"".join(hashes[:MAX_BLOCKS])
        assert len(blob) % HASH_BYTES == 0
        open_shards = [shard for shard in self._shards if not shard.breaker_open]
        if len(open_shards) < len(self._shards):
            self._count("skipped")
        if len(open_shards) == 1:
            return await self._lookup(open_shards[0], blob, model)
        answers = await asyncio.gather(*(self._lookup(shard, blob, model) for shard in open_shards))
        answered = [answer for answer in answers if answer is not None]
        return [candidate for answer in answered for candidate in answer] if answered else None

    async def _lookup(self, shard: Shard, blob: bytes, model: str | None) -> list[Candidate] | None:
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                candidates = await shard.lookup(blob, model)
        except TimeoutError:
            self._count("timeout")
        except LinkDownError as error:
            logger.debug("lookup failed: %s", error)
            self._count("down")
        except Exception as error:
            shard.broke(error)
        else:
            shard.succeeded()
            return candidates
        shard.failed()
        return None

    @property
    def blind(self) -> bool:
        """No shard answers now."""
        return all(shard.breaker_open or not shard.link.up for shard in self._shards)

    def members(self) -> list[WorkerMember]:
        """The registry as last read, whatever the leases say; empty before it has been read once."""
        return [member for shard in self._shards for member in shard.members()]

    async def entries(self) -> list[RegistryEntry]:
        """The registry read now. Raises LinkDownError."""
        answers = [await shard.entries() for shard in self._shards]
        return [entry for answer in answers for entry in answer]

    def seen_entries(self) -> list[RegistryEntry]:
        """The registry as lookups saw it last, at most `poll_s` ago while Redis answers; nothing is asked."""
        return [entry for shard in self._shards for entry in shard.seen_entries()]

    def health(self) -> list[ShardHealth]:
        return [ShardHealth(shard.link.label, shard.link.up, shard.breaker_open) for shard in self._shards]

    async def ping(self) -> None:
        """A PING on the first shard's connection, within the deadline as a lookup: the yardstick of the bench."""
        async with asyncio.timeout(self._settings.deadline_s):
            await self._shards[0].link.submit((b"*1\r\n$4\r\nPING\r\n",), 1)
        self._shards[0].succeeded()
