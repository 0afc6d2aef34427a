"""Reads a registry hash whole only if it is small: any client of Redis may store a field of 512 MB there.

Its size is read first. Of a hash that is too large, only short values under short names are read. So one foreign field
costs only itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from redis.exceptions import ResponseError

from cache.redis_index.client import Command, RedisClient, Reply
from cache.redis_index.schema import (
    MAX_MEMBER_BYTES,
    MAX_MEMBERS,
    MAX_NAME_BYTES,
    MAX_STATE_BYTES,
    Keys,
    ReplyError,
    brief,
    decode_hash,
)

MAX_HASH_BYTES: Final = 32 << 20
"""Enough for a registry of 20,000 workers."""
_SPARE_BYTES: Final = 64 << 10  # up to this size a hash is read whole, whatever is in it
_OVERHEAD_BYTES: Final = 512
"""The bytes of a field without its value: its name, and Redis' own structures."""


@dataclass(frozen=True, slots=True)
class HashLimit:
    """A hash, and the maximum size of a value in it."""

    key: bytes
    max_value_bytes: int

    def most_bytes(self, num_fields: int) -> int:
        """Return the size in Redis of a hash with `num_fields` of Headstart's fields."""
        return min(MAX_HASH_BYTES, _SPARE_BYTES + num_fields * (self.max_value_bytes + _OVERHEAD_BYTES))


@dataclass(frozen=True, slots=True)
class HashReading:
    """A hash as it was read."""

    pairs: Sequence[tuple[bytes, bytes | None]]
    """None: the value is too long to be read."""
    is_whole: bool = True
    """False: the hash is too large, and only some names were read."""
    error: ResponseError | None = None
    """Redis' refusal: the key has another type, until a worker replaces it."""


class HashReader:
    """Reads the registry of one shard. Owned by the `Shard` of a reader, or the `RegistryUpkeep` of a writer."""

    def __init__(self, client: RedisClient, keys: Keys, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self.members = HashLimit(keys.members, MAX_MEMBER_BYTES)
        self.states = HashLimit(keys.states, MAX_STATE_BYTES)
        self._unreadable: set[bytes] = set()
        """Hashes whose names could not be read: they are too long, or the connection failed."""

    async def sizes(self, *limits: HashLimit) -> tuple[int, list[HashLimit]]:
        """Return how many fields these hashes have, and which of them are too large. Raises RedisDownError.

        None seems too large if an ACL forbids the commands.
        """
        commands: list[Command] = []
        for limit in limits:
            commands += [("HLEN", limit.key), ("MEMORY", "USAGE", limit.key, "SAMPLES", 0)]
        replies = await self._client.call(*commands, timeout_s=self._timeout_s)
        num_all, large = 0, []
        for limit, num_fields, num_bytes in zip(limits, replies[::2], replies[1::2], strict=True):
            num_all += num_fields if type(num_fields) is int else 0
            if type(num_fields) is int and type(num_bytes) is int and num_bytes > limit.most_bytes(num_fields):
                large.append(limit)
            else:
                self._unreadable.discard(limit.key)
        return num_all, large

    async def read(self, *limits: HashLimit, known: Sequence[bytes] = ()) -> tuple[list[HashReading], Reply]:
        """Return what these hashes hold, and the reply of TIME at the end. Raises RedisDownError and ReplyError.

        The names in each hash are the workers' ids. So a hash that is too large is read by name: by the `known` ids,
        and those found in the other hash. If both are too large, the ids come from the first.
        """
        _, large = await self.sizes(*limits)
        small = [limit for limit in limits if limit not in large]
        commands: list[Command] = [("HGETALL", limit.key) for limit in small]
        *replies, now = await self._client.call(
            *commands, ("TIME",), timeout_s=self._timeout_s, max_reply_bytes=MAX_HASH_BYTES
        )
        readings: dict[bytes, HashReading] = {}
        for limit, reply in zip(small, replies, strict=True):
            is_refused = isinstance(reply, ResponseError)
            readings[limit.key] = HashReading([], error=reply) if is_refused else HashReading(decode_hash(reply))
        if large:
            names = {*known, *(name for reading in readings.values() for name, _ in reading.pairs)}
            if not small:
                names.update(await self.names(limits[0].key) or ())
            short = sorted(name for name in names if len(name) <= MAX_NAME_BYTES)[:MAX_MEMBERS]
            for limit in large:
                readings[limit.key], now = await self._read_short(limit, short)
        return [readings[limit.key] for limit in limits], now

    async def names(self, key: bytes) -> list[bytes] | None:
        """Return the names in a hash; None if they are too long to be read, as the call before this one found.

        Raises RedisDownError.
        """
        if key in self._unreadable:
            return None
        self._unreadable.add(key)  # until its names have been read
        (reply,) = await self._client.call(("HKEYS", key), timeout_s=self._timeout_s)
        self._unreadable.discard(key)
        return [name for name in reply if type(name) is bytes] if isinstance(reply, list) else []

    async def _read_short(self, limit: HashLimit, names: Sequence[bytes]) -> tuple[HashReading, Reply]:
        """Read those of `names` whose values are short. Raises RedisDownError and ReplyError."""
        lengths = [("HSTRLEN", limit.key, name) for name in names]
        *sizes, _ = await self._client.call(*lengths, ("TIME",), timeout_s=self._timeout_s)
        asked = [
            name for name, size in zip(names, sizes, strict=True) if type(size) is int and size <= limit.max_value_bytes
        ]
        reply, now = await self._client.call(
            ("HMGET", limit.key, *(asked or (b"",))),
            ("TIME",),
            timeout_s=self._timeout_s,
            max_reply_bytes=MAX_HASH_BYTES,
        )
        if isinstance(reply, ResponseError):
            return HashReading([], is_whole=False, error=reply), now
        if not isinstance(reply, list) or len(reply) != max(1, len(asked)):
            raise ReplyError(f"no values of {len(asked)} names: {brief(reply)}")
        values = dict(zip(asked, reply, strict=False))
        pairs = [(name, values.get(name)) for name in names if name not in values or type(values[name]) is bytes]
        return HashReading(pairs, is_whole=False), now
