"""Exchanges the use of keys with the other gateways through Redis: no request waits for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import msgspec

from cache.redis_index import GatewayRecords, RedisDownError
from server.auth.fleet_limits import FleetLimits, GatewayRecord

log = logging.getLogger(__name__)

DEADLINE_S: Final = 0.025
BUSY_S: Final = 0.02
"""Between two exchanges while keys with limits are used."""
IDLE_S: Final = 0.1
JOIN_S: Final = 1.0
"""The longest time that a gateway waits for its part of the limits."""
MAX_LOAD: Final = 0.05
"""The most of this gateway's processor that exchanges take."""
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(GatewayRecord).decode


class SharedLimits:
    """Keeps `FleetLimits` up to date. One task calls `run`; call `close` at the end."""

    def __init__(
        self, limits: FleetLimits, records: GatewayRecords | None, name: str, count: Callable[[str], None]
    ) -> None:
        """`records`: None without a Redis. `name`: the gateway's id.

        `count` counts exchanges without an answer in time, and invalid records.
        """
        self.limits = limits
        self.records = records
        self._name = name
        self._count = count
        self._decoded: dict[str, tuple[bytes, GatewayRecord]] = {}
        """By gateway; a record that has not changed is not decoded again."""
        self._is_down = False

    async def run(self) -> None:
        while True:
            pause_s = max(BUSY_S, await self.exchange() / MAX_LOAD)
            await asyncio.sleep(pause_s)
            until_s = time.monotonic() + IDLE_S
            while not (self.limits.is_busy or self.limits.was_used()) and time.monotonic() < until_s:  # noqa: ASYNC110
                await asyncio.sleep(pause_s)

    async def join(self) -> None:
        """Get a part of the limits before the first request, or go on without Redis."""
        until_s = time.monotonic() + JOIN_S
        while self.records is not None and not self.limits.is_ready and time.monotonic() < until_s:
            await self.exchange()
            await asyncio.sleep(BUSY_S)
        self.limits.begin()

    async def exchange(self, *, is_last: bool = False) -> float:
        """Publish the own use, and take the others'. Return the seconds of this process that it took."""
        begun_s = time.perf_counter()
        day = f"{datetime.now(UTC):%Y%m%d}"
        record = self.limits.record(day, is_last=is_last)
        if self.records is None:
            return IDLE_S * MAX_LOAD
        data = _encode(record)
        sent_s = time.perf_counter()
        try:
            found = await self.records.exchange(self._name, day, data, DEADLINE_S)
        except RedisDownError as error:
            self._failed(error)
            return sent_s - begun_s
        received_s = time.perf_counter()
        if self.limits.has_begun:
            found.pop(self._name, None)
        self.limits.merge(self._read(found))
        if self._is_down:
            log.info("the limits of keys hold over all gateways again")
            self._is_down = False
        return sent_s - begun_s + time.perf_counter() - received_s

    def _read(self, found: dict[str, bytes]) -> dict[str, GatewayRecord]:
        decoded: dict[str, tuple[bytes, GatewayRecord]] = {}
        for name, data in found.items():
            known = self._decoded.get(name)
            try:
                decoded[name] = known if known is not None and known[0] == data else (data, _decode(data))
            except msgspec.MsgspecError:
                self._count("invalid")
        self._decoded = decoded
        return {name: record for name, (_, record) in decoded.items()}

    def _failed(self, error: RedisDownError) -> None:
        self._count("timeout")
        if self.limits.missed() and not self._is_down:
            self._is_down = True
            log.warning("limits of keys: no answer from Redis, so this gateway grants its own share: %s", error)

    async def close(self) -> None:
        """Publish that this gateway has ended."""
        await self.exchange(is_last=True)
