"""POST /blocks, /chains and /adopt: what they refuse, and peers that leave, stall, or are too many."""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.types import ChainLink
from tests.waiting import HANG_S, until
from tests.worker.kv_transfer.moving_engine import RECORD
from tests.worker.kv_transfer.moving_worker import HASHES, TOKEN, moving_worker
from tests.worker.live_worker import LiveWorker
from tests.worker.scheduler.engine import ROOT
from worker.contracts.exchange import MAX_CHAINS, BlocksWanted, ChainsWanted, Handover
from worker.http import blocks
from worker.http.blocks import MAX_FETCHES, BlocksEndpoint
from worker.http.service import WorkerService
from worker.wire import WireError, unpack

WANTED: dict[str, Any] = {
    "epoch": "e1",
    "layout": RECORD.fingerprint,
    "parent": ROOT,
    "depth": 0,
    "hashes": b"".join(HASHES),
}
CHAIN: dict[str, Any] = {"root": ROOT, "hashes": b"".join(HASHES)}
HANDOVER: dict[str, Any] = {
    "url": "http://127.0.0.1:1",
    "epoch": "e1",
    "layout": RECORD.fingerprint,
    "chains": [CHAIN],
}
CHAINS_WANTED: dict[str, Any] = {"epoch": "e1", "layout": RECORD.fingerprint, "max_blocks": 10}
SENT = {"/blocks": WANTED, "/chains": CHAINS_WANTED, "/adopt": HANDOVER}


async def post(worker: LiveWorker, path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    async with worker.http.post(worker.url + path, data=io.BytesIO(body), headers=headers) as response:
        return response.status, await response.read()


async def test_messages_that_no_worker_sends() -> None:
    unsent: list[tuple[str, dict[str, Any]]] = [
        ("/blocks", {"hashes": b"x" * 15}),
        ("/blocks", {"hashes": b"x" * 17}),
        ("/blocks", {"hashes": b"x" * (16 * (1 << 16) + 16)}),
        ("/blocks", {"hashes": "x" * 16}),
        ("/blocks", {"parent": b"x" * 15}),
        ("/blocks", {"parent": b""}),
        ("/blocks", {"depth": -1}),
        ("/blocks", {"depth": 1 << 31}),
        ("/blocks", {"depth": 1 << 63}),
        ("/blocks", {"depth": 0.5}),
        ("/blocks", {"epoch": None}),
        ("/blocks", {"layout": 1}),
        ("/chains", {"max_blocks": -1}),
        ("/chains", {"max_blocks": 1 << 17}),
        ("/adopt", {"chains": [CHAIN | {"hashes": b"x" * 15}]}),
        ("/adopt", {"chains": [CHAIN | {"hashes": b"x" * 33}]}),
        ("/adopt", {"chains": [CHAIN | {"root": b"x" * 17}]}),
        ("/adopt", {"chains": [CHAIN] * (MAX_CHAINS + 1)}),
        ("/adopt", {"chains": {}}),
        ("/adopt", {"url": None}),
    ]
    async with moving_worker() as worker:
        for path, change in unsent:
            status, _ = await post(worker, path, msgpack.packb(SENT[path] | change))
            assert status == 400, (path, change)
        for path in ("/blocks", "/chains"):
            for change in ({"epoch": "e0"}, {"layout": "other"}):
                status, _ = await post(worker, path, msgpack.packb(SENT[path] | change))
                assert status == 409, (path, change)
        status, body = await post(worker, "/blocks", msgpack.packb(WANTED))
        assert (status, len(body)) == (200, 8 * (5 + RECORD.record_bytes))


@pytest.mark.parametrize("path", ["/blocks", "/chains", "/adopt"])
async def test_a_body_without_end_is_refused(path: str) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"\xc6" * (1 << 20)

    async with moving_worker() as worker:
        async with worker.http.post(worker.url + path, data=endless()) as response:
            assert response.status == 413
        assert (await post(worker, "/blocks", msgpack.packb(WANTED)))[0] == 200


@pytest.mark.parametrize("path", ["/blocks", "/chains", "/adopt"])
@pytest.mark.parametrize("shown", ["", "Bearer ", "Bearer wrong", TOKEN])
async def test_without_the_token_nothing_is_said(path: str, shown: str) -> None:
    async with moving_worker() as worker:
        status, body = await post(worker, path, msgpack.packb(WANTED), authorization=shown)
        assert status == 401
        unknown = await post(worker, path, b"", authorization=shown)
        assert unknown == (status, body), "whatever it asks"


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=60)
@given(
    body=st.binary(max_size=64)
    | json_like.map(msgpack.packb)
    | st.sampled_from([WANTED, HANDOVER]).flatmap(
        lambda message: st.dictionaries(st.sampled_from(sorted(message)), json_like, max_size=2).map(
            lambda change: msgpack.packb({**message, **change})
        )
    )
)
def test_any_body_is_a_message_or_a_wire_error(body: bytes) -> None:
    for kind in (BlocksWanted, ChainsWanted, Handover):
        try:
            message = unpack(body, kind)
        except WireError:
            continue
        links = message.links() if isinstance(message, BlocksWanted) else []
        chains = message.chains if isinstance(message, Handover) else ()
        hashes = [link.block_hash for link in links] + [each for chain in chains for each in chain.block_hashes()]
        assert all(len(each) == 16 for each in hashes)
        for link in links:
            RECORD.header(link, memoryview(bytes(RECORD.payload_bytes)))


# --- peers that take, or do not ------------------------------------------------------------------------------------


class Endless:
    """Has any block, and counts what it gave."""

    layout = RECORD.fingerprint

    def __init__(self) -> None:
        self.num_read = 0
        self.endpoints: list[BlocksEndpoint] = []

    @property
    def num_open(self) -> int:
        return sum(endpoint._num_open for endpoint in self.endpoints)

    def new_payload(self) -> memoryview:
        return memoryview(bytearray(RECORD.payload_bytes))

    def read_record(self, link: ChainLink, payload: memoryview) -> bytes:
        self.num_read += 1
        return bytes(1 << 20)  # a large header

    def adopt(self, *chain: object) -> Future[int]:
        raise AssertionError


@pytest.fixture
async def endless(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[LiveWorker, Endless]]:
    exchange = Endless()
    make = BlocksEndpoint.__init__

    def make_and_keep(self: BlocksEndpoint, service: WorkerService) -> None:
        make(self, service)
        exchange.endpoints.append(self)

    monkeypatch.setattr(BlocksEndpoint, "__init__", make_and_keep)
    async with moving_worker() as worker:
        monkeypatch.setattr(blocks, "exchange_for", lambda *asked: exchange)
        yield worker, exchange


ALL_WANTED = msgpack.packb(WANTED | {"hashes": b"x" * 16 * 5_000})


@asynccontextmanager
async def asking(worker: LiveWorker, count: int) -> AsyncIterator[list[socket.socket]]:
    """Connections that ask for all and read nothing."""
    sockets = []
    head = f"POST /blocks HTTP/1.1\r\nhost: w\r\nauthorization: {worker.http.headers['authorization']}\r\n"
    head += f"content-length: {len(ALL_WANTED)}\r\n\r\n"
    port = int(worker.url.rsplit(":", 1)[1])
    for _ in range(count):
        sock = socket.create_connection(("127.0.0.1", port), HANG_S)
        sock.setblocking(True)
        await asyncio.to_thread(sock.sendall, head.encode() + ALL_WANTED)
        sockets.append(sock)
    try:
        yield sockets
    finally:
        for sock in sockets:
            sock.close()


async def test_a_peer_that_has_left_is_read_for_no_more(endless: tuple[LiveWorker, Endless]) -> None:
    worker, exchange = endless
    async with asking(worker, 1):
        await until(lambda: exchange.num_read > 0)
    await until(lambda: exchange.num_open == 0)
    assert exchange.num_read < 1000


async def test_a_peer_that_reads_nothing_is_left_after_a_while(
    endless: tuple[LiveWorker, Endless], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, exchange = endless
    monkeypatch.setattr(blocks, "STALL_S", 0.05)
    async with asking(worker, MAX_FETCHES):
        await until(lambda: exchange.num_read >= MAX_FETCHES)
        await until(lambda: exchange.num_open == 0)
    assert exchange.num_read < 1000


async def test_more_peers_than_are_served_at_a_time_are_refused(endless: tuple[LiveWorker, Endless]) -> None:
    worker, exchange = endless
    async with asking(worker, MAX_FETCHES):
        await until(lambda: exchange.num_open == MAX_FETCHES)
        status, _ = await post(worker, "/blocks", ALL_WANTED)
        assert status == 429
    await until(lambda: exchange.num_open == 0)
