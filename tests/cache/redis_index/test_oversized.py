"""Whatever its size in Redis, a foreign value costs readers little memory, and the entries next to it stay usable."""

from __future__ import annotations

import asyncio
import gc
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import redis

from cache.records import WorkerLoad
from cache.redis_index import IndexWriter, ReaderSettings, RedisIndex, SetChange, WriterSettings, schema
from cache.redis_index.connection import BoundedParser
from tests.cache.redis_index.index_parts import LASTING, SECRET, becomes, chain, entries, hold, linked, matches, member
from tests.redis_server import RedisServer, redis_binaries
from tests.waiting import HANG_S, until

pytestmark = pytest.mark.e2e

MIB: Final = 1 << 20
KEYS: Final = schema.Keys("headstart", 0)
SETTINGS: Final = ReaderSettings(poll_s=0.05, deadline_s=HANG_S, cluster_secret=SECRET, max_refresh_age_s=0.5)
MAX_HELD_S: Final = 0.15
LONG: Final = b""
"""Stands for the value in a command."""
PLACES: Final = {
    "members": (b"HSET", KEYS.members, b"junk", LONG),
    "states": (b"HSET", KEYS.states, b"junk", LONG),
    "member of w0": (b"HSET", KEYS.members, b"w0", LONG),
    "state of w0": (b"HSET", KEYS.states, b"w0", LONG),
    "name in members": (b"HSET", KEYS.members, LONG, b"junk"),
    "name in states": (b"HSET", KEYS.states, LONG, b"junk"),
    "version": (b"SET", KEYS.version, LONG),
}
ON_ANY_REDIS: Final = [pytest.param(name, marks=pytest.mark.deep) for name in sorted(redis_binaries())[1:]]


@pytest.fixture(params=[sorted(redis_binaries())[0], *ON_ANY_REDIS])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path, redis_binaries()[request.param], "--proto-max-bulk-len", "1gb") as running:
        yield running


def put(server: RedisServer, place: str, num_bytes: int) -> None:
    """Write a value from a thread, a MiB at a time."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(server.socket))
        client.sendall(b"*%d\r\n" % len(PLACES[place]))
        for word in PLACES[place]:
            client.sendall(b"$%d\r\n" % (num_bytes if word is LONG else len(word)))
            for start in range(0, num_bytes if word is LONG else 0, MIB):
                client.sendall(b"x" * min(MIB, num_bytes - start))
            client.sendall(word + b"\r\n")
        assert client.recv(1) in b":+"


@dataclass
class Use:
    """The most that this process has used."""

    grown_bytes: int = 0
    held_s: float = 0.0


@contextmanager
def peak() -> Iterator[Use]:
    """Measure the growth of this process's memory, without the collector's help."""
    use = Use()
    gc.collect()
    gc.disable()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = _status("VmRSS")
    try:
        yield use
    finally:
        use.grown_bytes = _status("VmHWM") - before
        gc.enable()


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


@asynccontextmanager
async def watched(use: Use) -> AsyncIterator[None]:
    """Note the most processor time between two turns of the loop."""
    loop = asyncio.get_running_loop()
    last_s = time.thread_time()
    handle: Any = None

    def turn() -> None:
        nonlocal last_s, handle
        now_s = time.thread_time()
        use.held_s = max(use.held_s, now_s - last_s)
        last_s = now_s
        handle = loop.call_later(0.001, turn)

    turn()
    try:
        yield
    finally:
        handle.cancel()


async def stands(server: RedisServer, place: str, num_bytes: int, most_bytes: int) -> None:
    """Keep a foreign value for three reads of the registry; then remove it."""
    hashes = chain(10)
    settings = WriterSettings(timeout_s=HANG_S, lease_s=LASTING.lease_s, cluster_secret=SECRET)
    writers = [IndexWriter(server.url, member(f"w{n}"), settings) for n in range(2)]
    index = RedisIndex(server.url, SETTINGS)
    (shard,) = index.shards
    async with linked(index, *writers):
        await hold(hashes, index, *writers)
        with peak() as use:
            async with watched(use):
                await asyncio.to_thread(put, server, place, num_bytes)
                for _ in range(3):
                    read_at = shard._refreshed_at
                    await until(lambda at=read_at: shard._refreshed_at > at and shard.client.up)  # type: ignore[misc]
                    found = await matches(index, hashes)
                    assert found is None or found["w1"] == 10
                assert await matches(index, hashes) == {"w0": 10, "w1": 10}, "the others stay usable"
        assert use.grown_bytes < most_bytes, f"{use.grown_bytes / MIB:.0f} MiB more"
        assert use.held_s < MAX_HELD_S

        async def tidy() -> bool:
            for writer in writers:
                if writer.in_doubt:
                    await writer.rewrite([entry[:8] for entry in hashes], WorkerLoad())
                else:
                    await writer.publish([SetChange([], [], 10)], WorkerLoad())
                await writer.upkeep.remove_oversized()
            with redis.Redis(unix_socket_path=str(server.socket)) as store:
                names = [store.hlen(key) == 2 for key in (KEYS.members, KEYS.states)]
                sizes = [store.hstrlen(key, f"w{n}") < 9000 for key in (KEYS.members, KEYS.states) for n in range(2)]
            return all(names) and all(sizes)

        with peak() as use:
            await until(tidy)
            await until(becomes(index, hashes, {"w0": 10, "w1": 10}))
        assert use.grown_bytes < most_bytes, f"{use.grown_bytes / MIB:.0f} MiB more"


@pytest.mark.parametrize("place", PLACES)
async def test_a_value_of_60_mb_is_not_read(server: RedisServer, place: str) -> None:
    await stands(server, place, 60 * MIB, 40 * MIB)


@pytest.mark.deep
@pytest.mark.parametrize("place", PLACES)
async def test_a_value_of_512_mb_is_not_read(server: RedisServer, place: str) -> None:
    await stands(server, place, 511 * MIB, 64 * MIB)


@pytest.mark.parametrize("places", [*((place,) for place in PLACES), ("members", "states")], ids=" and ".join)
async def test_a_gateway_starts_despite_a_long_value(server: RedisServer, places: tuple[str, ...]) -> None:
    """The value costs only itself, also where no worker was known before, or where one joins later."""
    hashes = chain(10)
    settings = WriterSettings(timeout_s=HANG_S, lease_s=LASTING.lease_s, cluster_secret=SECRET)
    writers = [IndexWriter(server.url, member(f"w{n}"), settings) for n in range(4)]
    index = RedisIndex(server.url, SETTINGS)
    async with linked(*writers):
        for writer in writers[:3]:
            assert await writer.rewrite(entries(hashes), WorkerLoad())
        for place in places:
            await asyncio.to_thread(put, server, place, 2 * MIB)
        hit = {place.split()[-1] for place in places}
        expected = {f"w{n}": 10 for n in range(4) if f"w{n}" not in hit}
        async with linked(index):
            await until(becomes(index, hashes, {name: 10 for name in expected if name != "w3"}))
            assert await writers[3].rewrite(entries(hashes), WorkerLoad())
            await until(becomes(index, hashes, expected))


async def test_long_names_in_both_hashes_end_no_connection_twice(server: RedisServer) -> None:
    """They are read once. The gateway sees the workers as soon as one of them has removed the names."""
    hashes, ups = chain(10), list[bool]()
    writer = IndexWriter(
        server.url, member(), WriterSettings(timeout_s=HANG_S, lease_s=LASTING.lease_s, cluster_secret=SECRET)
    )
    index = RedisIndex(server.url, SETTINGS)
    (shard,) = index.shards
    changed = shard.client._on_change

    def note(up: bool) -> None:
        ups.append(up)
        changed(up)

    shard.client._on_change = note
    async with linked(writer):
        assert await writer.rewrite(entries(hashes), WorkerLoad())
        for place in ("name in members", "name in states"):
            await asyncio.to_thread(put, server, place, 40 * MIB)
        async with linked(index):
            for _ in range(3):
                read_at = shard._refreshed_at
                await until(lambda at=read_at: shard._refreshed_at > at)  # type: ignore[misc]
            assert ups.count(False) == 1, "reading the names once"

            async def tidied() -> bool:
                await writer.upkeep.remove_oversized()
                if writer.in_doubt:
                    await writer.rewrite(entries(hashes), WorkerLoad())
                else:
                    await writer.publish([SetChange([], [], 10)], WorkerLoad())
                return await matches(index, hashes) == {"w0": 10}

            await until(tidied)


async def test_a_dropped_connection_frees_what_it_has_read(server: RedisServer) -> None:
    """Reference counts free it after each reply, without the garbage collector."""
    index = RedisIndex(server.url, SETTINGS)
    await asyncio.to_thread(put, server, "version", 100 * MIB)
    async with linked(index):
        (shard,) = index.shards
        with peak() as use:
            for _ in range(2):
                await until(lambda: shard.client.up)
                with pytest.raises(Exception, match="more than"):
                    await shard.client.call(("GET", KEYS.version), timeout_s=HANG_S)
        assert use.grown_bytes < 40 * MIB, f"{use.grown_bytes / MIB:.0f} MiB more"
        assert not [each for each in gc.get_objects() if type(each) is BoundedParser and each._reader is not None][1:]
