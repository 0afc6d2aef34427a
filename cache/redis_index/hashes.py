"""Reads a registry hash whole only if it is small: any client of Redis may store a field of 512 MB there.

Its size is read first. Of a hash that is too large, only known names with short values are read. So the workers'
entries stay usable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from redis.exceptions import ResponseError

from cache.redis_index.client import Argument, RedisClient, Reply
from cache.redis_index.schema import MAX_MEMBER_BYTES, MAX_STATE_BYTES, Keys, ReplyError, brief, decode_hash

MAX_HASH_BYTES: Final = 32 << 20
"""Enough for a registry of 20,000 workers."""
_SPARE_BYTES: Final = 64 << 10
_OVERHEAD_BYTES: Final = 512
"""The bytes of a field without its value: its name, and Redis' own structures."""

_Command = Sequence[Argument]


@dataclass(frozen=True, slots=True)
class HashLimit:
    """A hash, and the maximum size of a value in it."""

    key: bytes
    max_value_bytes: int


def registry_hashes(keys: Keys) -> tuple[HashLimit, HashLimit]:
    """Return the members and the states."""
    return HashLimit(keys.members, MAX_MEMBER_BYTES), HashLimit(keys.states, MAX_STATE_BYTES)


@dataclass(frozen=True, slots=True)
class HashReading:
    """A hash as it was read."""

    pairs: list[tuple[bytes, bytes]]
    """The value of a known name that is too long is empty."""
    is_whole: bool = True
    """False: only known names were read."""
    error: ResponseError | None = None
    """Redis' refusal: the key has another type, until a worker replaces it."""


def size_commands(limit: HashLimit) -> list[_Command]:
    """Return the commands whose replies `is_too_large` takes."""
    return [("HLEN", limit.key), ("MEMORY", "USAGE", limit.key, "SAMPLES", 0)]


def is_too_large(limit: HashLimit, num_fields: Reply, num_bytes: Reply) -> bool:
    """Return whether a hash is larger than its fields may be. False if an ACL forbids the commands."""
    if type(num_fields) is not int or type(num_bytes) is not int:
        return False
    return num_bytes > min(MAX_HASH_BYTES, _SPARE_BYTES + num_fields * (limit.max_value_bytes + _OVERHEAD_BYTES))


async def read_hashes(
    client: RedisClient, limits: Sequence[HashLimit], names: Sequence[bytes], timeout_s: float
) -> tuple[list[HashReading], Reply]:
    """Read hashes, and the reply of TIME at the end. Of a hash that is too large, read only `names`.

    Raises RedisDownError and ReplyError.
    """
    sizes = await client.call(*(command for limit in limits for command in size_commands(limit)), timeout_s=timeout_s)
    large = [is_too_large(limit, *sizes[2 * at : 2 * at + 2]) for at, limit in enumerate(limits)]
    short: dict[bytes, list[bytes]] = {}
    for limit in (limit for limit, is_large in zip(limits, large, strict=True) if is_large and names):
        lengths = await client.call(*(("HSTRLEN", limit.key, name) for name in names), timeout_s=timeout_s)
        short[limit.key] = [
            name
            for name, length in zip(names, lengths, strict=True)
            if type(length) is int and 0 < length <= limit.max_value_bytes
        ]
    commands: list[_Command] = []
    for limit, is_large in zip(limits, large, strict=True):
        asked = short.get(limit.key, [])
        commands.append(("HGETALL", limit.key) if not is_large else ("HMGET", limit.key, *(asked or (b"",))))
    *replies, now = await client.call(*commands, ("TIME",), timeout_s=timeout_s, max_reply_bytes=MAX_HASH_BYTES)
    readings = []
    for limit, is_large, reply in zip(limits, large, replies, strict=True):
        if isinstance(reply, ResponseError):
            readings.append(HashReading([], error=reply))
        elif is_large:
            readings.append(HashReading(_named(names, short.get(limit.key, []), reply), is_whole=False))
        else:
            readings.append(HashReading(decode_hash(reply)))
    return readings, now


def _named(names: Sequence[bytes], asked: Sequence[bytes], reply: Reply) -> list[tuple[bytes, bytes]]:
    """Return each of `names` with its value in an HMGET of those `asked`. Raises ReplyError."""
    if not isinstance(reply, list) or len(reply) != max(1, len(asked)):
        raise ReplyError(f"no values of {len(asked)} names: {brief(reply)}")
    values = dict(zip(asked, reply, strict=False))
    return [(name, value if type(value := values.get(name)) is bytes else b"") for name in names]
