"""Workers as they stand in Redis, each holding some of a prompt, and connections to them.

    three    3 workers match, the others nothing        head    all hold only block 0
    shared   all share 64 blocks                        deep    all match deep, each differently from its neighbour

Also `random`: all match deep, at lengths that have nothing to do with each other: no search hint helps there.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from cache.hashing import index_entry
from cache.records import WorkerLoad, WorkerMember
from cache.redis_index import IndexWriter, ReaderSettings, RedisIndex
from cache.redis_index.client import RedisClient
from cache.redis_index.schema import Keys, Signer, encode_member, encode_state
from cache.types import BlockHash, Epoch, GatewayId, IndexEntry, Tier, WorkerId
from worker.wire import PROTOCOL_VERSION

PATTERNS: Final = ("three", "head", "shared", "deep")
OTHER_BLOCKS: Final = 200
"""Blocks a worker holds besides those of the prompt."""
OTHER_ENDS: Final = 600
"""Those with ends: Redis keeps a hash of up to 512 entries as a list, which no pool of a usual size has."""
STEP: Final = 8
"""Blocks between two ends."""
LOAD: Final = WorkerLoad({GatewayId("gateway-1"): 1.5, GatewayId("gateway-2"): 0.25}, 1000.0, 8000.0, 5, 3, 900, 2000)
SECRET: Final = b"cluster secret"
"""Entries are signed, as those of `headstart serve` are."""
READER: Final = ReaderSettings(deadline_s=5.0, poll_s=3600.0, cluster_secret=SECRET)
SIGNER: Final = Signer(SECRET, READER.prefix, 0)
FAR_MS: Final = 1 << 50


def depth(pattern: str, number: int, num_blocks: int, num_workers: int, rng: random.Random) -> int:
    """How many blocks of the prompt worker `number` holds."""
    match pattern:
        case "three":
            return rng.randrange(num_blocks // 4, num_blocks) if number % (num_workers // 3) == 7 else 0
        case "head":
            return 1
        case "shared":
            return 64
        case "deep":
            return num_blocks // 2 + number % (num_blocks // 2)
    return rng.randrange(num_blocks // 2, num_blocks)


def chain(length: int) -> list[BlockHash]:
    return [BlockHash(os.urandom(16)) for _ in range(length)]


def entries(length: int) -> list[IndexEntry]:
    return [IndexEntry(os.urandom(8)) for _ in range(length)]


def member_of(number: int, tiers: tuple[Tier, ...] = (), ends: str = "") -> WorkerMember:
    name = f"worker-{number:04}"
    return WorkerMember(
        WorkerId(name),
        Epoch(f"{number:016x}"),
        f"http://10.0.{number // 256}.{number % 256}:8000",
        "model",
        "0" * 32,
        "cuda-bfloat16",
        16,
        131072,
        PROTOCOL_VERSION,
        tiers=tiers,
        ends=ends,
    )


def state_of(member: WorkerMember, batch: int) -> bytes:
    """Return what the worker writes at its publish number `batch`."""
    state = encode_state(member, LOAD, set_version=1, batch=batch, deadline_ms=FAR_MS, written_ms=1, num_entries=9)
    return SIGNER.sign_state(member.worker_id, state)


async def populate(
    client: RedisClient,
    hashes: Sequence[BlockHash],
    num_workers: int,
    pattern: str,
    on_disk: str = "",
    *,
    has_ends: bool = False,
) -> None:
    """A registry of live workers, each with its set, as their writers leave it; `on_disk` is the pattern of a tier.

    With `has_ends`, a hit may stop at every eighth block.
    """
    rng = random.Random(0)
    keys = Keys(READER.prefix, 0)
    await client.call(("FLUSHALL",), timeout_s=30)
    for number in range(num_workers):
        member = member_of(number, ("disk",) if on_disk else (), "exact" if has_ends else "")
        tiers: list[tuple[Tier | None, str]] = [(None, pattern)]
        if on_disk:
            tiers.append(("disk", on_disk))
        for tier, kind in tiers:
            held = [index_entry(h) for h in hashes[: depth(kind, number, len(hashes), num_workers, rng)]]
            key = keys.pool(member, 1) if tier is None else keys.blocks(member.worker_id, member.epoch, 1, tier)
            if has_ends:
                stops = [word for at, entry in enumerate(held, 1) for word in (entry, at - at % STEP)]
                others = [word for entry in entries(OTHER_ENDS) for word in (entry, 100)]
                await client.call(("HSET", key, *stops, *others), timeout_s=30)
                continue
            await client.call(("SADD", key, *held, *entries(OTHER_BLOCKS)), timeout_s=30)
        await client.call(
            ("HSET", keys.members, member.worker_id, SIGNER.sign_member(member.worker_id, encode_member(member))),
            ("HSET", keys.states, member.worker_id, state_of(member, 1)),
            timeout_s=30,
        )
    await client.call(("SET", keys.version, os.urandom(8)), timeout_s=30)


@asynccontextmanager
async def running(*parts: RedisIndex | IndexWriter | RedisClient) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(part.run()) for part in parts]
    try:
        for part in parts:
            await _connected(part)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _connected(part: RedisIndex | IndexWriter | RedisClient) -> None:
    deadline_s = time.monotonic() + 20.0
    while time.monotonic() < deadline_s:
        client = part.client if isinstance(part, IndexWriter) else part
        if client.health()[0]["connected"] if isinstance(client, RedisIndex) else client.up:
            return
        await asyncio.sleep(0.001)
    raise SystemExit("no connection to Redis")
