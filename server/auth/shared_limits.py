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

DEADLINE_S: Final = 0.025  # of one exchange: it ends before the next period
MAX_LATE: Final = 20
"""Exchanges in a row without an answer, after which the log has a line."""
PERIOD_S: Final = 0.04  # a gift moves with an exchange: twice refuses more, half doubles the work of Redis
JOIN_S: Final = 1.0
"""The longest wait for a share of the limits before the first request, some 40 exchanges."""
MAX_LOAD: Final = 0.05
"""The largest part of one processor that exchanges take; with many keys in use they become rarer."""
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(GatewayRecord).decode


class SharedLimits:
    """Keeps `FleetLimits` up to date. One task calls `run`."""

    def __init__(
        self, limits: FleetLimits, records: GatewayRecords | None, name: str, count: Callable[[str], None]
    ) -> None:
        """`records`: None without a Redis. `name`: the gateway's id.

        `count` receives "timeout" for an exchange without an answer in time, and "invalid" for a record.
        """
        self.limits = limits
        self.records = records
        self._name = name
        self._count = count
        self._decoded: dict[bytes, GatewayRecord] = {}
        """A record that has not changed is not decoded again."""
        self._num_late = 0

    async def run(self) -> None:
        while True:
            spent_s = await self.exchange()
            await asyncio.sleep(max(PERIOD_S, spent_s / MAX_LOAD))

    async def join(self) -> None:
        """Get a share of the limits before the first request, or begin without Redis."""
        until_s = time.monotonic() + JOIN_S
        while self.records is not None and not self.limits.is_ready and time.monotonic() < until_s:
            await self.exchange()
            await asyncio.sleep(PERIOD_S / 2)
        self.limits.begin()

    async def exchange(self, *, is_last: bool = False) -> float:
        """Publish this gateway's use, and merge that of the others. Return the processor seconds that it took.

        `is_last`: this gateway has ended.
        """
        begun_s = time.thread_time()
        day = f"{datetime.now(UTC):%Y%m%d}"
        record = self.limits.record(day, is_last=is_last)
        if self.records is None:
            return 0.0
        data = _encode(record)
        spent_s = time.thread_time() - begun_s
        try:
            found = await self.records.exchange(self._name, day, data, DEADLINE_S)
        except RedisDownError as error:
            self._count("timeout")
            self._num_late += 1
            if self._num_late == MAX_LATE:
                log.warning("limits of keys: no answer from Redis, so this gateway grants its own share: %s", error)
            return spent_s
        received_s = time.thread_time()
        self.limits.merge(self._read(found))
        if self._num_late >= MAX_LATE:
            log.info("the limits of keys hold over all gateways again")
        self._num_late = 0
        return spent_s + time.thread_time() - received_s

    def _read(self, found: dict[str, bytes]) -> dict[str, GatewayRecord]:
        if self.limits.has_begun:  # before, its own record shows that others can read it
            found.pop(self._name, None)
        decoded = {}
        for data in found.values():
            try:
                decoded[data] = self._decoded.get(data) or _decode(data)
            except msgspec.MsgspecError:
                self._count("invalid")
        self._decoded = decoded
        return {name: decoded[data] for name, data in found.items() if data in decoded}
