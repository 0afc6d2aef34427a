"""The upkeep of one shard's registry, which every worker of the shard does: dead members and foreign values."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cache.hashing import index_entry
from cache.redis_index import schema
from cache.redis_index.client import Argument, Command, RedisClient, RedisDownError, Reply, Transactions
from cache.redis_index.connection import WriterSettings
from cache.redis_index.hashes import HashReader
from cache.redis_index.registry import Registry, RegistryEntry
from cache.redis_index.schema import Keys, RegistryError, ReplyError, Signer
from cache.types import BlockHash, WorkerId

logger = logging.getLogger(__name__)

MAX_FOREIGN_BYTES: Final = 64 << 10
"""Longer names and values are not a worker's, whatever its version: they are removed."""


@dataclass(eq=False)
class RegistryUpkeep:
    """Reads and cleans the registry of a shard. Owned by an `IndexWriter`."""

    _client: RedisClient
    _transactions: Transactions
    _keys: Keys
    _signer: Signer
    _worker_id: WorkerId
    """The owner's, which is never removed."""
    _settings: WriterSettings
    _count: Callable[[str], None]
    """Counts "invalid" and "stale" values."""

    def __post_init__(self) -> None:
        self._hashes = HashReader(self._client, self._keys, self._settings.timeout_s)

    async def workers(self) -> list[RegistryEntry]:
        """Return the registry of the shard; empty if it cannot be read."""
        registry = Registry(self._count, self._signer)
        try:
            (members, states), now = await self._hashes.read(self._hashes.members, self._hashes.states)
            registry.now_ms = schema.decode_time_ms(now)
            registry.refresh(members.pairs, states.pairs)
        except (RedisDownError, ReplyError) as error:
            logger.debug("the registry cannot be read: %s", error)
        return registry.entries()

    async def held(self, entries: Sequence[RegistryEntry], hashes: Sequence[BlockHash]) -> list[bool]:
        """Return for each block whether one of the workers has it in its pool; False where this cannot be read."""
        keys = [self._keys.blocks(each.member.worker_id, each.member.epoch, each.set_version) for each in entries]
        names = [index_entry(block_hash) for block_hash in hashes]
        if not keys or not names:
            return [False] * len(hashes)
        commands: list[Command] = [("SMISMEMBER", key, *names) for key in keys]
        replies = await self._transactions.ask(*commands)
        answers = [each for each in replies or () if isinstance(each, list) and len(each) == len(names)]
        return [any(answer[at] == 1 for answer in answers) for at in range(len(names))]

    async def prune(self) -> int:
        """Remove members whose lease ended `dead_after_s` ago. A revived worker writes a new entry."""
        try:
            (states,), now = await self._hashes.read(self._hashes.states)
            now_ms = schema.decode_time_ms(now)
        except RedisDownError as error:
            logger.debug("not pruned: %s", error)
            return 0
        except ReplyError as error:
            self._client.reconnect(str(error))
            return 0
        limit_ms, own = now_ms - int(self._settings.dead_after_s * 1000), self._worker_id.encode()
        dead = [field for field, value in states.pairs if field != own and _is_dead(value, limit_ms)][:1000]
        if dead:
            await self._transactions.run(removal(self._keys, dead))
            logger.info("removed %d dead members from the registry", len(dead))
        return len(dead)

    async def remove_oversized(self) -> int:
        """Remove fields that are far too long from the registry. Return how many fields it has.

        A hash whose names are too long to read is unlinked: each worker writes its own entry again.
        """
        try:
            num_fields, large = await self._hashes.sizes(self._hashes.members, self._hashes.states)
            for limit in large:
                await self._shorten(limit.key)
        except RedisDownError as error:
            logger.debug("foreign values were not removed: %s", error)
            return 0
        return num_fields

    async def _shorten(self, key: bytes) -> None:
        """Raises RedisDownError."""
        names = await self._hashes.names(key)
        if names is None:
            await self._transactions.run([("UNLINK", key), new_version(self._keys)])
            logger.warning("removed %s: its names were too long to be read", key.decode())
            return
        lengths = await self._transactions.ask(*(("HSTRLEN", key, name) for name in names)) if names else None
        if lengths is None:
            return
        sizes = [length if type(length) is int else 0 for length in lengths]
        long = [name for name, size in zip(names, sizes, strict=True) if max(size, len(name)) > MAX_FOREIGN_BYTES]
        if long:
            await self._transactions.run([("HDEL", key, *long[:1000]), new_version(self._keys)])
            logger.warning("removed %d fields that were far too long from %s", len(long), key.decode())


def new_version(keys: Keys) -> Command:
    """Return the command that makes readers read the registry again."""
    return ("SET", keys.version, secrets.token_hex(8))


def removal(keys: Keys, worker_ids: Sequence[Argument]) -> list[Command]:
    """Return the commands that remove workers from the registry."""
    return [("HDEL", keys.members, *worker_ids), ("HDEL", keys.states, *worker_ids), new_version(keys)]


def _is_dead(state: Reply, limit_ms: int) -> bool:
    try:
        return schema.decode_state(state).deadline_ms < limit_ms
    except RegistryError:
        return False  # perhaps a newer worker's
