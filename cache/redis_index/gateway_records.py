"""One signed record of each gateway, in a hash for each day: gateways write only here, as a user of their own.

prefix-limits:DAY    HASH, gateway id -> MAC and record, for two days
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2s
from hmac import compare_digest
from typing import Final

from cache.redis_index.client import RedisClient, RedisDownError
from cache.redis_index.connection import ClientSettings
from cache.redis_index.schema import ReplyError, decode_hash

MAX_REPLY_BYTES: Final = 2 << 20  # bounds what foreign fields of the hash cost a gateway
MAX_LATE: Final = 100
"""Late replies in a row after which the key counts as spoiled: some 6 s, longer than Redis forks or rewrites."""
_MAC_BYTES: Final = 16  # no forger guesses 128 bits
_KEPT_S: Final = 2 * 86_400  # the day of a record, and one more for clocks that differ


class GatewayRecords:
    """The records of all gateways. One task calls `run`; call `exchange` from its loop."""

    def __init__(
        self,
        url: str,
        prefix: str,
        cluster_secret: bytes,
        settings: ClientSettings,
        count: Callable[[str], None] = lambda event: None,
    ) -> None:
        """`count` counts "invalid" for records that no gateway has written. Raises ValueError."""
        self._client = RedisClient(url, settings, count=self._unreadable)
        self._prefix = prefix
        self._key = blake2s(cluster_secret, digest_size=32, person=b"limits").digest()
        self._count = count
        self._is_spoiled = False
        """The key has another type, or is too long to read: it is deleted, and all gateways write again."""
        self._num_late = 0
        self.run = self._client.run

    async def exchange(self, name: str, day: str, record: bytes, timeout_s: float) -> dict[str, bytes]:
        """Return the records of the day, and replace that of the gateway `name`. Raises RedisDownError."""
        key = f"{self._prefix}-limits:{day}"
        written = self._mac(day, name.encode(), record) + record
        if self._is_spoiled:
            self._is_spoiled = False
            await self._client.call(("DEL", key), timeout_s=timeout_s)
        commands = (("HGETALL", key), ("HSET", key, name, written), ("EXPIRE", key, _KEPT_S))
        self._num_late += self._client.up
        self._is_spoiled = self._num_late % MAX_LATE == MAX_LATE - 1
        replies = await self._client.call(*commands, timeout_s=timeout_s, max_reply_bytes=MAX_REPLY_BYTES)
        self._num_late, self._is_spoiled = 0, False
        if failed := [reply for reply in replies if isinstance(reply, Exception)]:
            self._is_spoiled = str(failed[0]).startswith("WRONGTYPE")
            raise RedisDownError(str(failed[0]))
        try:
            pairs = decode_hash(replies[0])
        except ReplyError as error:
            self._client.reconnect(str(error))
            raise RedisDownError(str(error)) from None
        return {
            other.decode(errors="replace"): data[_MAC_BYTES:] for other, data in pairs if self._holds(day, other, data)
        }

    def _unreadable(self, event: str) -> None:
        self._is_spoiled = event == "invalid"
        self._count(event)

    def _holds(self, day: str, name: bytes, data: bytes) -> bool:
        holds = compare_digest(data[:_MAC_BYTES], self._mac(day, name, data[_MAC_BYTES:]))
        if not holds:
            self._count("invalid")
        return holds

    def _mac(self, day: str, name: bytes, record: bytes) -> bytes:
        about = b"%d\0%b%d\0%b%b" % (len(self._prefix), self._prefix.encode(), len(name), name, day.encode())
        return blake2s(about + record, key=self._key, digest_size=_MAC_BYTES).digest()
