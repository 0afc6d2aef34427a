"""TLS with a private CA and ACL users, a Cluster of three masters, and Sentinel, as real processes."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from cache.records import WorkerLoad
from cache.redis_index import IndexWriter, ReaderSettings, RedisIndex, SetChange, WriterSettings
from tests.cache.redis_index.index_parts import becomes, chain, entries, matches, member
from tests.cache.redis_index.test_faults import GATEWAY_RIGHTS, WORKER_RIGHTS, running
from tests.certificates import Authority
from tests.e2e.serving import free_ports
from tests.redis_server import REDIS_7, RedisServer, needs_redis_7, needs_redis_tls
from tests.waiting import HANG_S, until

HASHES = chain(12)

pytestmark = needs_redis_7


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for a unix socket."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


async def written(writer: IndexWriter, count: int) -> None:
    async def stands() -> bool:
        return writer.client.up and await writer.rewrite(entries(HASHES[:count]), WorkerLoad())

    await until(stands)


@needs_redis_tls
async def test_tls_with_an_own_ca_users_and_a_key_prefix(folder: Path) -> None:
    (port,) = free_ports(1)
    authority, other = Authority(folder / "ca"), Authority(folder / "other")
    cert, key = authority.issue("redis", "127.0.0.1")
    files = ("--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", authority.path)
    tls = ("--tls-port", str(port), *map(str, files), "--tls-auth-clients", "no")
    with RedisServer(folder, REDIS_7, *tls) as server:
        server.command("ACL", "SETUSER", "gateway", "on", ">g/@:#", "%R~{team-a:*", *GATEWAY_RIGHTS)
        server.command("ACL", "SETUSER", "worker", "on", ">w", "~{team-a:*", *WORKER_RIGHTS)
        server.command("ACL", "SETUSER", "default", "off")
        writer = IndexWriter(
            f"rediss://worker:w@127.0.0.1:{port}?ssl_ca_certs={authority.path}",
            member("w"),
            WriterSettings(timeout_s=HANG_S, prefix="team-a"),
        )
        reader = ReaderSettings(prefix="team-a", poll_s=0.05, username="gateway", password="g/@:#")
        url = f"rediss://127.0.0.1:{port}?ssl_ca_certs="
        index, stranger = (RedisIndex(f"{url}{signer.path}", reader) for signer in (authority, other))
        async with running(writer, index, stranger):
            await written(writer, 7)
            await until(becomes(index, HASHES, {"w": 7}))
            assert await matches(stranger, HASHES) is None, "a certificate of another CA"
            assert not stranger.health()[0]["connected"]


# --- a Cluster --------------------------------------------------------------------------------------------------------


def cluster(folder: Path, stack: ExitStack) -> list[tuple[RedisServer, int]]:
    """Start three joined masters with a third of the slots each; return them with their ports."""
    numbers = free_ports(6)
    ports, bus_ports = numbers[:3], numbers[3:]
    nodes = []
    for number, (port, bus_port) in enumerate(zip(ports, bus_ports, strict=True)):
        (folder / str(number)).mkdir()
        options = ("--cluster-enabled", "yes", "--cluster-port", str(bus_port), "--cluster-node-timeout", "2000")
        server = stack.enter_context(RedisServer(folder / str(number), REDIS_7, "--port", str(port), *options))
        server.command("CLUSTER", "ADDSLOTSRANGE", str(16384 * number // 3), str(16384 * (number + 1) // 3 - 1))
        nodes.append((server, port))
    for port, bus_port in zip(ports[1:], bus_ports[1:], strict=True):
        nodes[0][0].command("CLUSTER", "MEET", "127.0.0.1", str(port), str(bus_port))
    return nodes


async def test_a_cluster_of_three_masters(folder: Path) -> None:
    """MOVED leads every shard to the node of its slot, also after the slot has moved."""
    with ExitStack() as stack:
        nodes = cluster(folder, stack)
        await until(lambda: all(b"cluster_state:ok" in node.command("CLUSTER", "INFO") for node, _ in nodes))
        url = f"redis+cluster://127.0.0.1:{nodes[0][1]},127.0.0.1:{nodes[1][1]}"
        writers = [
            IndexWriter(url, member(f"w{n}"), WriterSettings(timeout_s=HANG_S, num_shards=8, lease_s=600))
            for n in range(12)
        ]
        index = RedisIndex(url, ReaderSettings(num_shards=8, poll_s=0.05, deadline_s=HANG_S))
        async with running(*writers, index):
            for count, writer in enumerate(writers):
                await written(writer, count)
            await until(becomes(index, HASHES, {f"w{n}": n for n in range(12)}))
            assert all(node.command("DBSIZE") != b":0\r\n" for node, _ in nodes), "the shards lie on all nodes"

            slot = int(nodes[0][0].command("CLUSTER", "KEYSLOT", "{headstart:0}")[1:])
            _move([node for node, _ in nodes], slot)
            for count, writer in enumerate(writers):
                await written(writer, count)
            await until(becomes(index, HASHES, {f"w{n}": n for n in range(12)}))


def _move(nodes: Sequence[RedisServer], slot: int) -> None:
    """Give a slot to the next node, without its keys: the index is a hint, and workers rewrite it."""
    held = [node.command("CLUSTER", "COUNTKEYSINSLOT", str(slot)) for node in nodes]
    owner = next(number for number, count in enumerate(held) if count != b":0\r\n")
    _, heir, _ = nodes[(owner + 1) % 3].command("CLUSTER", "MYID").split(b"\r\n")
    for key in nodes[owner].command("CLUSTER", "GETKEYSINSLOT", str(slot), "1000").split(b"\r\n"):
        if b"{" in key:
            nodes[owner].command("DEL", key)
    for number in (owner + 1, owner, owner + 2):
        assert nodes[number % 3].command("CLUSTER", "SETSLOT", str(slot), "NODE", heir) == b"+OK\r\n"


# --- Sentinel ---------------------------------------------------------------------------------------------------------


async def test_sentinel_promotes_the_replica(folder: Path) -> None:
    """The primary dies; its writer and its reader find the promoted replica with all data."""
    first, second, watch = free_ports(3)
    for name in ("first", "second"):
        (folder / name).mkdir()
    config = folder / "sentinel.conf"
    config.write_text(
        f"port {watch}\ndir {folder}\nlogfile {folder}/sentinel.log\nsentinel monitor index 127.0.0.1 {first} 1\n"
        "sentinel down-after-milliseconds index 300\nsentinel failover-timeout index 1000\n"
    )
    with (
        RedisServer(folder / "first", REDIS_7, "--port", str(first)) as primary,
        RedisServer(folder / "second", REDIS_7, "--port", str(second), "--replicaof", f"127.0.0.1 {first}") as replica,
    ):
        await until(lambda: b"master_link_status:up" in replica.command("INFO", "replication"))
        sentinel = await asyncio.create_subprocess_exec(REDIS_7, str(config), "--sentinel")
        try:
            url = f"redis+sentinel://:{watch}/index"  # of this host
            writer = IndexWriter(url, member("w"), WriterSettings(timeout_s=HANG_S, lease_s=600.0))
            index = RedisIndex(url, ReaderSettings(poll_s=0.05, breaker_probe_s=0.05))
            async with running(writer, index):
                await written(writer, 9)
                await until(becomes(index, HASHES, {"w": 9}))
                await _until_it_knows_the_replica(watch)
                primary.kill()
                async with asyncio.timeout(HANG_S):
                    while writer.in_doubt or not await writer.publish([SetChange([], [], 9)], WorkerLoad()):
                        await index.lookup(HASHES)
                        if writer.client.up:
                            await writer.rewrite(entries(HASHES[:9]), WorkerLoad())
                        await asyncio.sleep(0.01)
                await until(becomes(index, HASHES, {"w": 9}))
                assert b"role:master" in replica.command("INFO", "replication")
        finally:
            sentinel.kill()
            await sentinel.wait()


async def _until_it_knows_the_replica(port: int) -> None:
    async def known() -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"SENTINEL REPLICAS index\r\n")
        reply = await reader.readline()
        writer.close()
        return reply == b"*1\r\n"

    await until(known)
