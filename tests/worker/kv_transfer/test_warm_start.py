"""The warm start: which chains come, within which bounds, and peers that refuse, hang or are none."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.hashing import hash_chain
from cache.records import WorkerLoad
from cache.redis_index import RegistryEntry
from cache.types import BlockHash, Epoch, WorkerId
from tests.members import make_member
from tests.running import listening
from tests.waiting import HANG_S
from tests.worker.kv_transfer.moving_engine import BLOCK_SIZE, RECORD
from tests.worker.kv_transfer.moving_worker import HASHES, LINKS, TOKEN, moving_worker
from tests.worker.scheduler.engine import ROOT
from worker.config import parse
from worker.contracts.exchange import ChainsWanted, Handover, OfferedChain
from worker.http import blocks
from worker.kv_transfer.mover import MAX_PEERS, has_purged, plan_chains, warm_start
from worker.kv_transfer.peers import PeerClient
from worker.kv_transfer.transfers import KVTransfers
from worker.main import Worker

MEMBER = make_member("joiner", epoch="e9", block_size=BLOCK_SIZE, layout=RECORD.fingerprint)


def entry(name: str, url: str = "", *, num_free: int = 10, lease_left_s: float = 5.0, **fields: Any) -> RegistryEntry:
    layout = fields.get("layout", RECORD.fingerprint)
    member = make_member(name, url=url or f"http://{name}", epoch="e1", block_size=BLOCK_SIZE, layout=layout)
    load = WorkerLoad(num_free_blocks=num_free, num_blocks=64, draining=fields.get("draining", False))
    return RegistryEntry(member, load, 64 - num_free, {}, 0, lease_left_s, 0.0)


def chain(*numbers: int) -> OfferedChain:
    hashes = hash_chain(ROOT, [n for n in numbers for _ in range(BLOCK_SIZE)], BLOCK_SIZE)
    return OfferedChain(ROOT, b"".join(hashes))


def offer(*chains: OfferedChain, url: str = "http://elsewhere") -> Handover:
    return Handover(url, "e0", "other", chains)


class Exchange:
    """Records what is fetched."""

    layout = RECORD.fingerprint

    def __init__(self, answers: dict[str, Handover | None], num_blocks: int = 64) -> None:
        self.num_blocks = num_blocks
        self.answers = answers
        self.asked: dict[str, ChainsWanted] = {}
        self.fetched: list[tuple[str, str, list[BlockHash]]] = []

    async def latest_chains(self, max_blocks: int) -> list[OfferedChain]:
        raise NotImplementedError

    async def ask(self, url: str, epoch: str, message: ChainsWanted, answer: type, timeout_s: float) -> Handover | None:
        self.asked[url] = message
        return self.answers.get(url, offer())

    async def adopt(self, url: str, epoch: str, chain: OfferedChain) -> int:
        self.fetched.append((url, epoch, chain.block_hashes()))
        return len(chain.block_hashes())


async def test_only_peers_with_blocks_to_give_are_asked() -> None:
    exchange = Exchange({"http://peer": offer(chain(1, 2), chain(3))})
    entries = [
        entry("joiner"),
        entry("other-layout", layout="x"),
        entry("gone", lease_left_s=0.0),
        entry("draining", draining=True),
        entry("empty", num_free=64),
        entry("peer"),
    ]
    assert (await warm_start(MEMBER, exchange, entries, HANG_S)).total() == 3
    assert exchange.asked == {"http://peer": ChainsWanted("e1", RECORD.fingerprint, 32)}
    fetched = [chain(1, 2).block_hashes(), chain(3).block_hashes()]
    assert exchange.fetched == [("http://peer", "e1", each) for each in fetched], "never where the answer leads"


async def test_a_large_fleet_is_asked_in_part() -> None:
    exchange = Exchange({})
    assert (await warm_start(MEMBER, exchange, [entry(f"w{number}") for number in range(50)], HANG_S)).total() == 0
    assert len(exchange.asked) == MAX_PEERS


async def test_a_peer_that_refuses_does_not_stop_the_others() -> None:
    exchange = Exchange({"http://a": None, "http://b": offer(chain(1, 2))})
    assert (await warm_start(MEMBER, exchange, [entry("a"), entry("b")], HANG_S)).total() == 2


async def test_no_chain_begins_after_the_time() -> None:
    class Slow(Exchange):
        async def adopt(self, url: str, epoch: str, chain: OfferedChain) -> int:
            await super().adopt(url, epoch, chain)
            return await asyncio.Future()

    exchange = Slow({"http://peer": offer(*(chain(n) for n in range(10)))})
    assert (await warm_start(MEMBER, exchange, [entry("peer")], 0.2)).total() == 0
    assert len(exchange.fetched) == 2


@given(
    offers=st.lists(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=8), max_size=4),
    room=st.integers(0, 20),
)
def test_the_plan_has_every_latest_chain_that_fits(offers: list[list[list[int]]], room: int) -> None:
    made = [offer(*(chain(*numbers) for numbers in chains)) for chains in offers]
    plan = plan_chains(made, room)
    hashes = [each for _, planned in plan for each in planned.block_hashes()]
    assert len(set(hashes)) <= room
    for peer, planned in plan:
        assert planned in peer.chains
    for peer in made:
        for each in peer.chains:
            missing = set(each.block_hashes()) - set(hashes)
            assert not missing or len(missing) + len(set(hashes)) > room


@pytest.mark.parametrize(
    ("epochs", "purged"),
    [
        ({"http://a": "e1", "http://b": "e1"}, False),
        ({"http://a": "e2", "http://b": "e1"}, True),
        ({"http://b": "e2"}, False),
        ({}, False),
    ],
)
def test_another_epoch_of_a_peer_counts_as_a_purge(epochs: dict[str, str], purged: bool) -> None:
    """Only a peer that gave blocks counts, and one that has left has purged nothing."""
    entries = [
        RegistryEntry(make_member(url, url=url, epoch=epoch), WorkerLoad(), 0, {}, 0, 5.0, 0.0)
        for url, epoch in epochs.items()
    ]
    dead = RegistryEntry(make_member("a-before", url="http://a", epoch="e0"), WorkerLoad(), 0, {}, 0, -5.0, 0.0)
    assert has_purged(Counter({("http://a", "e1"): 3}), [*entries, dead]) is purged


# --- over HTTP -----------------------------------------------------------------------------------------------------


async def test_a_worker_starts_with_the_blocks_of_another() -> None:
    async with moving_worker() as peer, moving_worker() as joiner:
        await asyncio.wrap_future(joiner.engine.purge())
        exchange = joiner.engine.exchange
        assert isinstance(exchange, KVTransfers)
        entries = [entry("peer", peer.url, num_free=56)]
        assert (await warm_start(MEMBER, exchange, entries, HANG_S)).total() == 8
        assert [joiner.scheduler.allocator.link(each) for each in HASHES] == LINKS
        assert (await warm_start(MEMBER, exchange, entries, HANG_S)).total() == 0, "it has them"
        joiner.scheduler.allocator.check_integrity()
        assert joiner.scheduler.allocator.num_free_blocks == joiner.scheduler.allocator.num_blocks - 1


async def test_a_peer_that_hangs_does_not_stop_the_others() -> None:
    asked, hangs = asyncio.Event(), asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await hangs.wait()

    async with moving_worker() as peer, moving_worker() as joiner, listening(hang) as port:
        await asyncio.wrap_future(joiner.engine.purge())
        exchange = joiner.engine.exchange
        assert isinstance(exchange, KVTransfers)
        entries = [entry("hangs", f"http://127.0.0.1:{port}"), entry("peer", peer.url)]
        num_blocks = 0
        while num_blocks < 8:  # a machine that stands still makes the other peer late, too
            num_blocks += (await warm_start(MEMBER, exchange, entries, 5.0)).total()
        assert num_blocks == 8
        assert asked.is_set()


async def test_an_answer_has_whole_chains_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    async with moving_worker() as peer:
        client = PeerClient(RECORD, TOKEN)

        async def chains(max_blocks: int) -> list[OfferedChain]:
            wanted = ChainsWanted("e1", RECORD.fingerprint, max_blocks)
            return list((await asyncio.to_thread(client.ask, peer.url, "e1", wanted, Handover, 30.0)).chains)

        assert await chains(100) == [OfferedChain(ROOT, b"".join(HASHES))]
        assert await chains(4) == []
        monkeypatch.setattr(blocks, "MAX_BLOCKS", 7)
        assert await chains(100) == []


async def test_requests_come_before_background_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker pauses after each record for which no request waits, as long as it has requests."""
    paused: list[WorkerLoad] = []

    def note(load: WorkerLoad, took_s: float) -> float:
        paused.append(load)
        return 0.0

    async with moving_worker() as peer:
        monkeypatch.setattr(blocks, "pause_s", note)

        def fetch(background: bool) -> int:
            payload = memoryview(bytearray(RECORD.payload_bytes))
            client = PeerClient(RECORD, TOKEN)
            with client.fetching(peer.url, "e1", LINKS, background=background) as stream:
                return sum(stream.read(link, payload, bytes) for link in LINKS)

        assert await asyncio.to_thread(fetch, False) == 8
        assert paused == []
        assert await asyncio.to_thread(fetch, True) == 8
        assert len(paused) == 8


@pytest.mark.parametrize(("load", "factor"), [({}, 0.0), ({"num_running": 1}, 3.0), ({"num_waiting": 1}, 3.0)])
def test_the_pause_is_as_long_as_the_record(load: dict[str, int], factor: float) -> None:
    assert blocks.pause_s(WorkerLoad(**load), 0.02) == pytest.approx(factor * 0.02)


@pytest.mark.parametrize("is_purged", [False, True])
async def test_a_worker_drops_what_was_purged_while_it_joined(is_purged: bool) -> None:
    """No gateway could name the joining worker in a purge."""

    class Registry:
        """A publisher whose registry has the peer; after a purge, with another epoch."""

        def __init__(self, url: str) -> None:
            self.entries = [entry("peer", url, num_free=56)]
            self.upkeep = self

        async def wait_connected(self, timeout_s: float) -> bool:
            return True

        async def workers(self) -> list[RegistryEntry]:
            entries, (peer,) = self.entries, self.entries
            if is_purged:
                self.entries = [replace(peer, member=replace(peer.member, epoch=Epoch("e2")))]
            return entries

    async with moving_worker() as peer, moving_worker() as joiner:
        await asyncio.wrap_future(joiner.engine.purge())
        joiner.engine.member = replace(joiner.engine.member, worker_id=WorkerId("joiner"), layout=RECORD.fingerprint)
        worker = Worker(parse(["--warm-start-s", "30"]))
        await worker._join(joiner.engine, Registry(peer.url))  # type: ignore[arg-type]
        found = joiner.scheduler.allocator.find_blocks(HASHES)
        assert len(found) == (0 if is_purged else len(HASHES))
