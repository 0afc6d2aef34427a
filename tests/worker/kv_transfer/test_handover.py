"""The hand-over: who gets which chain, and peers that refuse, hang or are none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from http.client import IncompleteRead
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.hashing import hash_chain
from cache.records import WorkerLoad
from cache.redis_index import RegistryEntry
from cache.types import BlockHash, ChainLink
from tests.cache.held import cached_hashes
from tests.members import make_member
from tests.running import listening
from tests.waiting import until
from tests.worker.kv_transfer.moving_engine import BLOCK_SIZE, RECORD
from tests.worker.kv_transfer.moving_worker import HASHES, LINKS, TOKEN, moving_worker
from tests.worker.scheduler.engine import ROOT
from worker.contracts.exchange import ChainsWanted, Handover, OfferedChain
from worker.kv_transfer import mover, peers
from worker.kv_transfer.mover import hand_over, share_out
from worker.kv_transfer.peers import FetchError, PeerClient
from worker.kv_transfer.transfers import KVTransfers

MEMBER = make_member(epoch="e1", block_size=BLOCK_SIZE, layout=RECORD.fingerprint)


def entry(name: str, num_free: int, url: str = "", *, draining: bool = False, lease_left_s: float = 5.0, **fields):
    layout = fields.get("layout", RECORD.fingerprint)
    member = make_member(name, url=url or f"http://{name}", block_size=BLOCK_SIZE, layout=layout)
    return RegistryEntry(member, WorkerLoad(num_free_blocks=num_free, draining=draining), 0, {}, 0, lease_left_s, 0.0)


def chain(*numbers: int) -> list[ChainLink]:
    hashes = hash_chain(ROOT, [n for n in numbers for _ in range(BLOCK_SIZE)], BLOCK_SIZE)
    return [ChainLink(each, hashes[n - 1] if n else ROOT, n) for n, each in enumerate(hashes)]


class Exchange:
    """Records the offers."""

    layout = RECORD.fingerprint

    def __init__(self, chains: list[list[ChainLink]], *, is_refused: bool = False) -> None:
        self.chains = chains
        self.is_refused = is_refused
        self.asked: list[int] = []
        self.offers: dict[str, Handover] = {}
        self.epochs: list[str] = []

    num_blocks = 100

    async def latest_chains(self, max_blocks: int) -> list[OfferedChain]:
        self.asked.append(max_blocks)
        return [OfferedChain.of(each) for each in self.chains] if max_blocks else []

    async def ask(
        self, url: str, epoch: str, message: Handover, answer: type, timeout_s: float
    ) -> dict[str, int] | None:
        self.offers[url] = message
        self.epochs.append(epoch)
        if self.is_refused and len(self.offers) == 1:
            return None
        return {"adopted_blocks": sum(len(each.block_hashes()) for each in message.chains)}


async def nowhere(entries: Sequence[RegistryEntry], hashes: Sequence[BlockHash]) -> list[bool]:
    return [False] * len(hashes)


async def test_chains_that_no_peer_holds_go_first() -> None:
    """The peer has room for two of three chains. The index has the most recently used one at a peer."""
    chains = [chain(1, 2), chain(3, 4), chain(5, 6)]
    asked = []

    async def held(entries: Sequence[RegistryEntry], hashes: Sequence[BlockHash]) -> list[bool]:
        asked.append([each.member.worker_id for each in entries])
        return [block_hash == chains[0][-1].block_hash for block_hash in hashes]

    exchange = Exchange(chains)
    assert await hand_over(MEMBER, exchange, [entry("peer", 8), entry("gone", 100, lease_left_s=0.0)], held) == 4
    assert asked == [["peer"]]
    offered = [each.hashes for each in exchange.offers["http://peer"].chains]
    assert offered == [OfferedChain.of(each).hashes for each in chains[1:]]


async def test_where_peers_evict_the_older_half_is_not_offered() -> None:
    """The pool has 8 blocks. Peers with 7 unused blocks take more than the 4 that full peers take."""
    chains = [chain(*range(10, 16)), chain(1, 2), chain(3, 4), chain(5)]
    for num_blocks, expected in ((0, 4), (7, 7)):
        exchange = Exchange(chains)
        exchange.num_blocks = 8
        peer = entry("peer", 100)
        peer = replace(peer, load=WorkerLoad(num_free_blocks=100, num_blocks=num_blocks))
        assert await hand_over(MEMBER, exchange, [peer], nowhere) == expected


async def test_only_peers_that_can_hold_blocks_are_asked() -> None:
    exchange = Exchange([chain(1, 2), chain(3)])
    entries = [
        entry("w", 100),
        entry("other-layout", 100, layout="x"),
        entry("gone", 100, lease_left_s=0.0),
        entry("draining", 100, draining=True),
        entry("full", 0),
        entry("peer", 10),
    ]
    assert await hand_over(MEMBER, exchange, entries, nowhere) == 3
    assert exchange.offers.keys() == {"http://peer"}
    assert exchange.epochs == [entries[-1].member.epoch], "what it shows is for that peer's epoch alone"
    assert exchange.asked == [100]
    offered = exchange.offers["http://peer"]
    assert (offered.url, offered.epoch, offered.layout) == (MEMBER.url, MEMBER.epoch, MEMBER.layout)


@pytest.mark.parametrize("entries", [[], [entry("w", 100)], [entry("peer", 1)]])
async def test_without_a_peer_nothing_is_offered(entries: Sequence[RegistryEntry]) -> None:
    exchange = Exchange([chain(1)])
    assert await hand_over(MEMBER, exchange, entries, nowhere) == 0
    assert exchange.offers == {}


async def test_a_peer_that_refuses_does_not_stop_the_others() -> None:
    exchange = Exchange([chain(1, 2), chain(3, 4)], is_refused=True)
    assert await hand_over(MEMBER, exchange, [entry("a", 10), entry("b", 10)], nowhere) == 2
    assert len(exchange.offers) == 2


@pytest.mark.parametrize(
    "error",
    [ConnectionRefusedError(), TimeoutError(), FetchError("503"), ValueError("port"), IncompleteRead(b"half")],
)
async def test_a_peer_that_gives_no_answer_has_none(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(PeerClient, "ask", refuse)
    async with moving_worker() as worker:
        exchange = worker.engine.exchange
        assert isinstance(exchange, KVTransfers)
        assert await exchange.ask("http://peer", "e1", ChainsWanted("e1", "", 1), Handover, 1.0) is None


@given(
    chains=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=5), max_size=30),
    room=st.lists(st.integers(0, 20), min_size=1, max_size=4),
)
def test_no_peer_gets_more_than_its_room(chains, room) -> None:
    made = [chain(*numbers) for numbers in chains]
    shares = share_out([OfferedChain.of(each) for each in made], room)
    assert len(shares) == len(room)
    for share, most in zip(shares, room, strict=True):
        assert len({each for offered in share for each in offered.block_hashes()}) <= most
    offered = [each.hashes for share in shares for each in share]
    if made and len(made[0]) <= max(room):
        assert b"".join(link.block_hash for link in made[0]) in offered


async def test_blocks_that_chains_share_are_counted_once() -> None:
    """Half of the pool's 100 blocks hold thirty conversations that share a system prompt of 20."""
    exchange = Exchange([chain(*range(20), 100 + number) for number in range(60)])
    assert await hand_over(MEMBER, exchange, [entry("peer", 2 * 50)], nowhere) == 30 * 21
    assert len(exchange.offers["http://peer"].chains) == 30


def test_no_peer_gets_more_chains_than_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hand-over with one chain too many would be refused as a whole."""
    monkeypatch.setattr(mover, "MAX_CHAINS", 3)
    monkeypatch.setattr(mover, "MAX_BLOCKS", 2)
    made = [chain(1, 2, 3), *(chain(n) for n in range(10, 20))]
    (share,) = share_out([OfferedChain.of(each) for each in made], [100])
    assert [len(each.block_hashes()) for each in share] == [1, 1, 1]


def test_an_offer_is_no_larger_than_a_worker_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that chains share take no further room, and are in the message all the same."""
    monkeypatch.setattr(mover, "MAX_SENT_HASHES", 25)
    made = [OfferedChain.of(chain(*range(9), 100 + number)) for number in range(5)]
    (share,) = share_out(made, [100])
    assert len(share) == 2


@pytest.mark.parametrize("limit", ["MAX_CHAINS", "MAX_SENT_HASHES"])
def test_a_full_message_leaves_chains_to_other_peers(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(mover, limit, 3)
    shares = share_out([OfferedChain.of(chain(n)) for n in range(10)], [100, 50])
    assert [len(share) for share in shares] == [3, 3]


# --- over HTTP -----------------------------------------------------------------------------------------------------


async def adopt(worker, url: str, *chains: OfferedChain, epoch: str = "e1") -> int:
    message, own = Handover(url, epoch, RECORD.fingerprint, chains), worker.engine.member.epoch
    client = PeerClient(RECORD, TOKEN)
    answer = await asyncio.to_thread(client.ask, worker.url, own, message, dict[str, int], 30.0)
    return answer["adopted_blocks"]


async def test_a_worker_adopts_the_chains_of_another() -> None:
    async with moving_worker() as leaver, moving_worker() as peer:
        await asyncio.wrap_future(peer.engine.purge())
        offered = OfferedChain(ROOT, b"".join(HASHES))
        assert await adopt(peer, leaver.url, offered) == 8
        assert [peer.scheduler.allocator.link(each) for each in HASHES] == LINKS
        assert await adopt(peer, leaver.url, offered) == 0, "it has them"
        peer.scheduler.allocator.check_integrity()
        assert peer.scheduler.allocator.num_free_blocks == peer.scheduler.allocator.num_blocks - 1


async def test_chains_that_are_none_cost_nothing() -> None:
    """No hashes, the same one twice, more than the pool holds, a chain under another root."""
    async with moving_worker() as leaver, moving_worker() as peer:
        await asyncio.wrap_future(peer.engine.purge())
        allocator = peer.scheduler.allocator
        for root, hashes in (
            (ROOT, b""),
            (b"x" * 16, b"".join(HASHES)),
            (ROOT, b"".join(reversed(HASHES))),
            (ROOT, Random(1).randbytes(16 * 10_000)),
            (ROOT, HASHES[0] * 3),
        ):
            await adopt(peer, leaver.url, OfferedChain(root, hashes))
            await peer.settled()
            allocator.check_integrity()
            assert allocator.num_free_blocks == allocator.num_blocks - 1
        assert set(cached_hashes(allocator)) <= {HASHES[0]}


async def test_whoever_stops_waiting_for_an_adoption_harms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that stops cancels its handlers, while the engine goes on."""
    monkeypatch.setattr(peers, "_FETCH_TIMEOUT_S", 0.5)
    asked, hangs = asyncio.Event(), asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await hangs.wait()

    async with moving_worker() as peer, listening(hang) as port:
        await asyncio.wrap_future(peer.engine.purge())
        exchange = peer.engine.exchange
        assert isinstance(exchange, KVTransfers)
        adopted = asyncio.create_task(
            exchange.adopt(f"http://127.0.0.1:{port}", "e1", OfferedChain(ROOT, b"".join(HASHES)))
        )
        await asked.wait()
        adopted.cancel()
        await until(lambda: exchange.fetches.active == [])
        await peer.settled()
        assert await peer.engine.liveness() is None


async def test_a_purge_ends_a_hand_over_to_the_purged_worker() -> None:
    """Chains that the peer has not fetched yet stay away."""
    async with moving_worker() as leaver, moving_worker() as peer:
        await asyncio.wrap_future(peer.engine.purge())
        exchange = peer.engine.exchange
        assert isinstance(exchange, KVTransfers)
        fetch = exchange.adopt

        async def purge_first(*chain_of_one) -> int:
            await asyncio.wrap_future(peer.engine.purge())
            return await fetch(*chain_of_one)

        exchange.adopt = purge_first  # type: ignore[method-assign]
        chains = [OfferedChain(ROOT, b"".join(HASHES[:count])) for count in (2, 4, 8)]
        assert await adopt(peer, leaver.url, *chains) == 2
