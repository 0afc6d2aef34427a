"""The upkeep of one shard's registry, which every worker of the shard does: dead members and foreign values."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Final

from cache.redis_index import schema
from cache.redis_index.client import Argument, RedisClient, RedisDownError, Reply
from cache.redis_index.hashes import HashLimit, is_too_large, read_hashes, registry_hashes, size_commands
from cache.redis_index.registry import Registry, RegistryEntry
from cache.redis_index.schema import Keys, RegistryError, ReplyError, Signer
from cache.redis_index.transactions import Command, Transactions
from cache.types import WorkerId

logger = logging.getLogger(__name__)

MAX_FOREIGN_BYTES: Final = 64 << 10
"""Longer names and values are not a worker's, whatever its version: they are removed."""


class RegistryUpkeep:
    """Reads and cleans the registry of a shard. Owned by an `IndexWriter`."""

    def __init__(
        self,
        client: RedisClient,
        transactions: Transactions,
        keys: Keys,
        signer: Signer,
        worker_id: WorkerId,
        timeout_s: float,
        dead_after_s: float,
        count: Callable[[str], None],
    ) -> None:
        """`worker_id` is the owner's, which is never removed; `count` counts "invalid" and "stale" values."""
        self._client = client
        self._transactions = transactions
        self._keys = keys
        self._signer = signer
        self._own_field = worker_id.encode()
        self._timeout_s = timeout_s
        self._dead_after_s = dead_after_s
        self._count = count
        self._hashes = registry_hashes(keys)
        self._unreadable: set[bytes] = set()
        """Hashes whose names could not be read: they are too long, or the connection failed."""

    async def workers(self) -> list[RegistryEntry]:
        """Return the registry of the shard; empty if it cannot be read."""
        registry = Registry(self._count, self._signer)
        try:
            (members, states), now = await read_hashes(self._client, self._hashes, (), self._timeout_s)
            registry.now_ms = schema.decode_time_ms(now)
            registry.refresh(members.pairs, states.pairs)
        except (RedisDownError, ReplyError) as error:
            logger.debug("the registry cannot be read: %s", error)
        return registry.entries()

    async def prune(self) -> int:
        """Remove members whose lease ended `dead_after_s` ago. A revived worker writes a new entry."""
        try:
            (states,), now = await read_hashes(self._client, self._hashes[1:], (), self._timeout_s)
            now_ms = schema.decode_time_ms(now)
        except RedisDownError as error:
            logger.debug("not pruned: %s", error)
            return 0
        except ReplyError as error:
            self._client.reconnect(str(error))
            return 0
        limit_ms = now_ms - int(self._dead_after_s * 1000)
        dead = [field for field, value in states.pairs if field != self._own_field and _is_dead(value, limit_ms)][:1000]
        if dead:
            await self._transactions.run(removal(self._keys, dead))
            logger.info("removed %d dead members from the registry", len(dead))
        return len(dead)

    async def remove_oversized(self) -> int:
        """Remove fields that are far too long from the registry. Return how many fields it has.

        A hash whose names are too long to read is unlinked: each worker writes its own entry again.
        """
        commands = [command for limit in self._hashes for command in size_commands(limit)]
        sizes = await self._transactions.ask(*commands)
        if sizes is None:
            return 0
        num_fields = 0
        for at, limit in enumerate(self._hashes):
            num_fields += sizes[2 * at] if type(sizes[2 * at]) is int else 0
            if is_too_large(limit, *sizes[2 * at : 2 * at + 2]):
                await self._shorten(limit)
        return num_fields

    async def _shorten(self, limit: HashLimit) -> None:
        key = limit.key
        if key in self._unreadable:
            self._unreadable.discard(key)
            await self._transactions.run([("UNLINK", key), new_version(self._keys)])
            logger.warning("removed %s: its names were too long to be read", key.decode())
            return
        self._unreadable.add(key)  # until its names have been read
        replies = await self._transactions.ask(("HKEYS", key))
        if replies is None:
            return
        self._unreadable.discard(key)
        names = [name for name in replies[0] if type(name) is bytes] if isinstance(replies[0], list) else []
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
