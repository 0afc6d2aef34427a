"""What a Redis says of itself to somebody who asks once, on a connection of its own."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from dataclasses import dataclass
from typing import Final

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError, ResponseError

from cache.redis_index.endpoint import Endpoint
from cache.redis_index.link import LinkDownError, Reply

NUM_PINGS: Final = 20


@dataclass(frozen=True, slots=True)
class RedisFacts:
    version: tuple[int, ...]
    """Empty when the user may not ask for it."""
    ping_s: float
    """The median of a few."""
    used_bytes: int
    max_bytes: int
    """0: no limit, or not known."""
    eviction: str
    """What happens at the limit: `noeviction`, `allkeys-lru` ..."""


async def diagnose(
    url: str, *, username: str | None = None, password: str | None = None, timeout_s: float = 3.0
) -> RedisFacts:
    """Raises LinkDownError with the reason, and ValueError for a URL of no known form."""
    endpoint = Endpoint(url, connect_timeout_s=timeout_s, username=username, password=password)
    connection: AbstractConnection | None = None
    try:
        async with asyncio.timeout(timeout_s):
            connection = await endpoint.open()
            return await _facts(connection)
    except TimeoutError:
        raise LinkDownError(f"no answer within {timeout_s:g} s") from None
    except (RedisError, OSError) as error:
        raise LinkDownError(str(error) or type(error).__name__) from error
    finally:
        if connection is not None:
            await connection.disconnect(nowait=True)


async def _facts(connection: AbstractConnection) -> RedisFacts:
    pings_s = []
    for _ in range(NUM_PINGS):
        begun_s = time.perf_counter()
        await _ask(connection, "PING")
        pings_s.append(time.perf_counter() - begun_s)
    told: dict[str, str] = {}
    for section in ("server", "memory"):
        try:
            told.update(_info(await _ask(connection, "INFO", section)))
        except ResponseError:  # an ACL user that may not
            continue
    return RedisFacts(
        version=tuple(int(part) for part in told.get("redis_version", "").split(".") if part.isdecimal()),
        ping_s=statistics.median(pings_s),
        used_bytes=int(told.get("used_memory", 0)),
        max_bytes=int(told.get("maxmemory", 0)),
        eviction=told.get("maxmemory_policy", ""),
    )


async def _ask(connection: AbstractConnection, *command: str) -> Reply:
    await connection.send_command(*command)
    return await connection.read_response(disable_decoding=True, timeout=math.inf)


def _info(reply: Reply) -> dict[str, str]:
    lines = bytes(reply).decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)
