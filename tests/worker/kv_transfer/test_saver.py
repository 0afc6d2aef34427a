"""Savers: blocks evicted before their turn, ancestors that the store dropped, and a purge at the worst time."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from cache.allocators.base import Allocation
from cache.allocators.hash import HashAllocator
from cache.hashing import hash_chain
from cache.records import WorkerLoad
from cache.stores.base import BlockStore
from cache.stores.host import HostStore
from cache.types import BlockHash, BlockId, ChainLink
from tests.cache.held import cached_hashes
from tests.members import make_member
from tests.waiting import HANG_S, until, wait_until
from tests.worker.kv_transfer.moving_engine import BLOCK_SIZE, PAYLOAD_BYTES, BytesCopier
from tests.worker.kv_transfer.moving_worker import HASHES, LINKS, RECORD, moving_worker
from tests.worker.scheduler.engine import ROOT
from worker.contracts.metrics import WorkerMetrics
from worker.contracts.rates import PrefillRate
from worker.kv_transfer.pool_blocks import PoolBlocks
from worker.kv_transfer.saver import BlockSaver
from worker.kv_transfer.transfers import KVTransfers


def host_store(num_blocks: int) -> HostStore:
    return HostStore([memoryview(bytearray(num_blocks * PAYLOAD_BYTES))], PAYLOAD_BYTES)


class Pool:
    """A small pool, and the saver of a store below it."""

    def __init__(self, store: BlockStore, num_blocks: int = 9) -> None:
        self.allocator = HashAllocator(num_blocks, BLOCK_SIZE)
        self.copier = BytesCopier(num_blocks)
        self.store = store
        self.num_saved = 0
        self.saver = BlockSaver(store, PoolBlocks(self.allocator, self.copier), self._count)

    def _count(self, store: BlockStore, num_blocks: int) -> None:
        self.num_saved += num_blocks

    def compute(self, token_ids: Sequence[int]) -> tuple[list[BlockHash], Allocation]:
        """Fill blocks with their hashes, as their content."""
        hashes = hash_chain(ROOT, token_ids, BLOCK_SIZE)
        allocation = self.allocator.allocate(len(token_ids), token_ids, ROOT)
        assert allocation is not None
        for block_id, block_hash in zip(allocation.block_table, hashes, strict=True):
            self.copier.blocks[block_id][:] = block_hash
        allocation.commit(token_ids, len(token_ids))
        return hashes, allocation

    def save(self, block_hash: BlockHash) -> int:
        return self.saver.save(block_hash, self.copier.new_payload())

    def assert_stored(self, hashes: Sequence[BlockHash]) -> None:
        payload = self.copier.new_payload()
        for depth, block_hash in enumerate(hashes):
            link = ChainLink(block_hash, hashes[depth - 1] if depth else ROOT, depth)
            assert self.store.read(link, payload)
            assert payload == block_hash


@pytest.fixture
def threads() -> Iterator[list[BlockSaver]]:
    started: list[BlockSaver] = []
    yield started
    for saver in started:
        saver.stop()


def test_a_block_evicted_before_its_turn_is_not_saved() -> None:
    pool = Pool(host_store(8))
    hashes, allocation = pool.compute(range(16))
    allocation.free()
    pool.compute(range(100, 132))
    assert [pool.save(block_hash) for block_hash in hashes] == [0] * 4
    assert len(pool.store) == 0


def test_a_block_evicted_while_it_is_copied_is_not_saved() -> None:
    pool = Pool(host_store(8))
    hashes, allocation = pool.compute(range(16))
    allocation.free()
    read = pool.copier.read

    def read_late(block_id, payload) -> None:
        if hashes[0] in cached_hashes(pool.allocator):
            pool.compute(range(100, 132))
        read(block_id, payload)

    pool.copier.read = read_late  # type: ignore[method-assign]
    assert pool.save(hashes[3]) == 0
    assert len(pool.store) == 0


def test_ancestors_that_the_store_has_dropped_are_saved_again() -> None:
    pool = Pool(host_store(3))
    hashes, _ = pool.compute(range(12))
    assert pool.save(hashes[2]) == 3
    others, _ = pool.compute(range(50, 62))
    for block_hash in others:
        pool.save(block_hash)
    assert pool.store.match(hashes) == 0
    assert pool.save(hashes[2]) == 3
    pool.assert_stored(hashes)


def test_of_a_chain_longer_than_the_store_the_head_is_saved() -> None:
    pool = Pool(host_store(3))
    hashes, _ = pool.compute(range(20))
    assert pool.save(hashes[4]) == 3
    pool.assert_stored(hashes[:3])
    assert pool.save(hashes[4]) == 0


class PurgedWhileSaving(HostStore):
    """Its saver has taken a block from the queue, and begins to save it just after the store was cleared."""

    def __init__(self) -> None:
        super().__init__([memoryview(bytearray(64 * PAYLOAD_BYTES))], PAYLOAD_BYTES)
        self.after_clear: Callable[[], object] = lambda: None

    def clear(self) -> None:
        super().clear()
        self.after_clear()


async def test_a_purge_between_two_moves_of_the_saver() -> None:
    store = PurgedWhileSaving()
    async with moving_worker(store) as worker:
        transfers = worker.engine.exchange
        assert isinstance(transfers, KVTransfers)
        (saver,) = transfers.savers.values()
        store.after_clear = lambda: saver.save(HASHES[-1], transfers.new_payload())
        await asyncio.wrap_future(worker.engine.purge())
        assert len(store) == 0


async def test_the_gauge_follows_what_is_dropped() -> None:
    """By a purge, and when a fetch or a peer's read finds a damaged record."""
    store = host_store(64)
    async with moving_worker(store) as worker:
        transfers = worker.engine.exchange
        assert isinstance(transfers, KVTransfers)
        payload = transfers.new_payload()

        def gauge() -> float | None:
            name, labels = "headstart_worker_kv_stored_blocks", {"tier": store.tier}
            return transfers._metrics.registry.get_sample_value(name, labels)

        await until(lambda: gauge() == len(HASHES))
        transfers._pool.read = lambda block_hash, payload: False
        store._read_record = lambda room, link, record: link not in LINKS[-2:]  # type: ignore[method-assign]
        assert transfers.read_record(LINKS[-1], payload) is None
        assert gauge() == len(HASHES) - 1
        assert not store.read(LINKS[-2], payload)
        transfers._fetched(SimpleNamespace(num_arrived=0, links=LINKS, finished=True, num_fetched_blocks=lambda _: {}))
        assert gauge() == len(HASHES) - 2
        await asyncio.wrap_future(worker.engine.purge())
        assert gauge() == 0


def test_a_write_that_began_before_a_purge_is_not_kept() -> None:
    store = host_store(8)
    pool = Pool(store)
    hashes, _ = pool.compute(range(8))
    read = pool.copier.read

    def read_and_purge(block_id, payload) -> None:
        read(block_id, payload)
        store.clear()

    pool.copier.read = read_and_purge  # type: ignore[method-assign]
    assert pool.save(hashes[1]) == 0
    assert len(store) == 0


def test_the_thread_saves_all_that_is_offered(threads: list[BlockSaver]) -> None:
    pool = Pool(host_store(8))
    hashes, _ = pool.compute(range(32))
    pool.saver.start_thread()
    threads.append(pool.saver)
    for block_hash in hashes:
        pool.saver.offer([block_hash])
    pool.saver.flush(HANG_S)
    assert pool.num_saved == 8
    pool.assert_stored(hashes)


class EmptiedInTime(deque[BlockHash]):
    """The thread takes the last block just before another is added."""

    def extend(self, hashes) -> None:
        self.clear()
        super().extend(hashes)


def test_a_block_offered_while_the_last_is_taken_wakes_it(threads: list[BlockSaver]) -> None:
    pool = Pool(host_store(8))
    hashes, _ = pool.compute(range(32))
    pool.saver.queue = EmptiedInTime(hashes[:1])
    pool.saver.offer(hashes[1:2])
    pool.saver.start_thread()
    threads.append(pool.saver)
    wait_until(lambda: hashes[1] in pool.store)


def test_a_store_that_raises_costs_one_block(threads: list[BlockSaver], caplog: pytest.LogCaptureFixture) -> None:
    store = host_store(8)
    pool = Pool(store)
    hashes, _ = pool.compute(range(32))
    write, failed = store.write, []

    def write_or_fail(link: ChainLink, payload: memoryview, *rest: Any) -> bool:
        if not failed:
            failed.append(link)
            raise OSError("the disk is on fire")
        return write(link, payload, *rest)

    store.write = write_or_fail  # type: ignore[method-assign]
    pool.saver.start_thread()
    threads.append(pool.saver)
    pool.saver.offer(hashes)
    pool.saver.flush(HANG_S)
    assert "not saved" in caplog.text
    pool.assert_stored(hashes)


class OfferedInTime(threading.Event):
    """A block is offered just before the thread becomes idle. Only the thread sets it."""

    def __init__(self, offer: Callable[[], None]) -> None:
        super().__init__()
        self.offering = threading.Thread(target=offer)
        self.was_set = threading.Event()

    def set(self) -> None:
        if self.offering.ident is None:
            self.offering.start()
            self.offering.join(0.2)  # it waits for its turn
        super().set()
        self.was_set.set()


def test_a_block_offered_as_the_thread_falls_idle_is_flushed(threads: list[BlockSaver]) -> None:
    pool = Pool(host_store(8))
    hashes, _ = pool.compute(range(32))
    read, may_read = pool.copier.read, threading.Event()

    def read_later(block_id: BlockId, payload: memoryview) -> None:
        if block_id != first_id:
            may_read.wait(HANG_S)
        read(block_id, payload)

    first_id = pool.allocator.block_of(hashes[0])
    pool.copier.read = read_later  # type: ignore[method-assign]
    is_idle = pool.saver._is_idle = OfferedInTime(lambda: pool.saver.offer(hashes[1:2]))
    pool.saver.offer(hashes[:1])
    pool.saver.start_thread()
    threads.append(pool.saver)
    assert is_idle.was_set.wait(HANG_S)
    is_idle.offering.join(HANG_S)
    threading.Timer(0.2, may_read.set).start()
    pool.saver.flush(HANG_S)
    assert hashes[1] in pool.store


class RemoteStore(HostStore):
    """A store of a new kind."""

    tier = "remote"  # type: ignore[assignment]
    takes = "all"
    guess_bytes_per_s = 8.0 * PAYLOAD_BYTES


def test_a_store_of_a_new_tier_states_what_it_takes() -> None:
    """Nothing else names its tier."""
    store = RemoteStore([memoryview(bytearray(4 * PAYLOAD_BYTES))], PAYLOAD_BYTES)
    pool = Pool(store)
    blocks = PoolBlocks(pool.allocator, pool.copier)
    rate, metrics = PrefillRate(1, 100.0), WorkerMetrics()
    transfers = KVTransfers(blocks, rate, [store], RECORD, None, metrics)
    hashes, _ = pool.compute(range(2 * BLOCK_SIZE))
    transfers.take(pool.allocator.take_events())
    assert list(transfers.savers["remote"].queue) == hashes
    assert transfers.described(make_member()) == make_member(tiers=("remote",), layout="")
    assert transfers.with_rates(WorkerLoad()).tier_tokens_per_s == (8.0 * BLOCK_SIZE,)
    transfers.purge()
    assert not transfers.savers["remote"].queue
