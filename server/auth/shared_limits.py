"""Exchanges the use of keys with the other gateways through Redis: no request waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from cache.redis_index import GatewayRecords, RedisDownError
from server.auth.fleet_limits import FleetLimits, GatewayRecord

log = logging.getLogger(__name__)

DEADLINE_S: Final = 0.025
BUSY_S: Final = 0.02
"""Between two exchanges while keys with limits are used."""
IDLE_S: Final = 0.1
JOIN_TRIES: Final = 25
MAX_LOAD: Final = 0.05
"""The most of this gateway's processor that exchanges take."""
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(GatewayRecord).decode


def place() -> str:
    """Return a name of this process that others of the same machine can check."""
    with contextlib.suppress(OSError):
        return f"{_machine()} {os.getpid()}"
    return ""


def is_gone(other: str) -> bool:
    """Return whether a process of this machine has ended. Of others that cannot be known."""
    machine, _, pid = other.rpartition(" ")
    with contextlib.suppress(OSError):
        return machine == _machine() and pid.isdecimal() and not Path("/proc", pid).exists()
    return False


def _machine() -> str:
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


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
        self._written: tuple[str, bytes] | None = None
        """The day and the record that Redis should have."""
        self._decoded: dict[str, tuple[bytes, GatewayRecord]] = {}
        """By gateway; a record that has not changed is not decoded again."""
        self._is_down = False
        self._num_answers = 0

    async def run(self) -> None:
        while True:
            pause_s = max(BUSY_S, await self.exchange() / MAX_LOAD)
            await asyncio.sleep(pause_s)
            until_s = time.monotonic() + IDLE_S
            while not (self.limits.is_busy or self.limits.was_used()) and time.monotonic() < until_s:  # noqa: ASYNC110
                await asyncio.sleep(pause_s)

    async def join(self) -> None:
        """Get a share of the limits before the first request, or go on without Redis: after a second at most."""
        for _ in range(JOIN_TRIES):
            await self.exchange()
            if self.records is None or (self._num_answers >= 3 and self.limits.part):
                return
            await asyncio.sleep(BUSY_S)

    async def exchange(self, *, is_last: bool = False) -> float:
        """Publish the own use, and take the others'. Return the seconds of this process that it took."""
        if self.records is None:
            self.limits.missed()
            return IDLE_S * MAX_LOAD
        begun_s = time.perf_counter()
        day = f"{datetime.now(UTC):%Y%m%d}"
        data = _encode(self.limits.record(day, is_last=is_last))
        sent_s = time.perf_counter()
        try:
            found = await self.records.exchange(self._name, day, data, DEADLINE_S)
        except RedisDownError as error:
            self._failed(error)
            return sent_s - begun_s
        received_s = time.perf_counter()
        own = found.pop(self._name, None)
        is_intact = self._written is None or self._written[0] != day or own == self._written[1]
        self._written = day, data
        self._num_answers += 1
        self.limits.merge(self._read(found), is_intact=is_intact)
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
