"""Loads whose readers hang, lag, raise or take turns: the engine thread goes on, and the pool stays its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import pytest

from cache.allocators.hash import HashAllocator
from cache.store import ChainLink
from cache.types import BlockHash, BlockId
from tests.waiting import HANG_S, wait_until
from tests.worker.kv_transfer.moving_engine import BLOCK_SIZE, BytesCopier
from tests.worker.scheduler.engine import ROOT, generate
from worker.contracts.engine import RequestKey
from worker.contracts.rates import PrefillRate, TransferRate
from worker.kv_transfer.fetches import FetchQueue, FetchSource, PrefixFetch
from worker.kv_transfer.pool_blocks import PoolBlocks
from worker.scheduler.request import Request, TokenSequence, split_into_sequences

NUM_BLOCKS = 33


class Source:
    """A place whose reads the test gates. It has the first `num_held` blocks of any chain."""

    def __init__(self, num_held: int = 100, tokens_per_s: float = 1e6) -> None:
        self.num_held = num_held
        self.rate = TransferRate(tokens_per_s)
        self.gate = threading.Event()
        self.gate.set()
        self.close_gate = threading.Event()
        self.close_gate.set()
        self.entered = threading.Semaphore(0)
        self.closing = threading.Semaphore(0)
        self.error: Exception | None = None
        self.fails_at = 1000
        self.hangs_at = 0
        """The depth from which reads wait for the gate."""
        self.read_blocks: list[BlockHash] = []

    @contextmanager
    def open(self, links: Sequence[ChainLink]) -> Iterator[Source]:
        yield self
        self.closing.release()
        assert self.close_gate.wait(HANG_S)

    def read(self, link: ChainLink, payload: memoryview) -> bool:
        self.entered.release()
        if link.depth >= self.hangs_at:
            assert self.gate.wait(HANG_S)
        if link.depth >= self.fails_at:
            if self.error is not None:
                raise self.error
            return False
        payload[:] = link.block_hash
        self.read_blocks.append(link.block_hash)
        return True


class Loads:
    """A queue with its threads, over a pool of bytes."""

    def __init__(self, *sources: Source, num_threads: int = 2, prefill_tokens_per_s: int = 10) -> None:
        self.allocator = HashAllocator(NUM_BLOCKS, BLOCK_SIZE)
        self.allocator.track_chains()
        self.copier = BytesCopier(NUM_BLOCKS)
        self.sources = sources
        self.ended: list[PrefixFetch] = []
        pool = PoolBlocks(self.allocator, self.copier)
        rate = PrefillRate(prefill_tokens_per_s, 1.0)
        self.queue = FetchQueue(self.allocator, pool, rate, self._find, self.ended.append, num_threads=num_threads)
        self.queue.start_threads()

    def _find(self, sequence: TokenSequence, hashes: Sequence[BlockHash], num_cached: int) -> list[FetchSource]:
        found, at = [], num_cached
        for number, source in enumerate(self.sources):
            if at < (stop := min(source.num_held, len(hashes))):
                found.append(FetchSource(f"s{number}", at, stop, source.rate, source.open))
                at = stop
        return found

    def sequence(self, num_blocks: int, last: int = 0) -> TokenSequence:
        """A prompt of `num_blocks` full blocks and a token. The last full block consists of `last`."""
        prompt_ids = [*range(BLOCK_SIZE * (num_blocks - 1)), *[last] * BLOCK_SIZE, 1]
        request = Request(RequestKey(0), generate(prompt_ids), 0.0, 60.0, {})
        (sequence,) = split_into_sequences(request, 16)
        return sequence

    def num_cached(self, sequence: TokenSequence) -> int:
        hashes = sequence.hash_blocks(BLOCK_SIZE)
        found = self.allocator.find_blocks(hashes)
        for block_id, block_hash in zip(found, hashes, strict=False):
            assert self.copier.blocks[block_id] == block_hash, "a findable block has other contents"
        return len(found)

    def start(self, sequence: TokenSequence) -> bool:
        return self.queue.start(sequence, self.num_cached(sequence))

    def run(self, sequence: TokenSequence) -> int:
        """Poll until the sequence no longer waits. Return the blocks that it finds."""
        wait_until(lambda: self.queue.poll(0.0) or not self.queue.is_fetching(sequence))
        return self.num_cached(sequence)

    def assert_idle(self) -> None:
        assert self.queue.num_active == 0
        assert self.allocator.num_free_blocks == NUM_BLOCKS - 1
        self.allocator.check_integrity()


@pytest.fixture
def make_loads() -> Iterator[Callable[..., Loads]]:
    made: list[Loads] = []

    def make(*sources: Source, **options: int) -> Loads:
        made.append(Loads(*sources, **options))
        return made[-1]

    yield make
    for loads in made:
        for source in loads.sources:
            source.gate.set()
            source.close_gate.set()
        loads.queue.stop()


def test_what_is_loaded_is_found(make_loads) -> None:
    loads = make_loads(Source(num_held=3), Source(num_held=5))
    sequence = loads.sequence(6)
    assert loads.start(sequence)
    assert loads.queue.is_fetching(sequence)
    assert loads.run(sequence) == 5
    assert sequence.fetched_tokens(BLOCK_SIZE) == {"s0": 3 * BLOCK_SIZE, "s1": 2 * BLOCK_SIZE}
    assert not loads.start(sequence), "once is enough"
    loads.assert_idle()


def test_a_reader_that_hangs_ends_the_fetch_late(make_loads) -> None:
    """Its place counts as slow."""
    source = Source()
    source.gate.clear()
    loads = make_loads(source)
    sequence = loads.sequence(4)
    assert loads.start(sequence)
    source.entered.acquire()
    (load,) = loads.queue.active
    loads.queue.poll(load.deadline_s - 1e-3)
    assert loads.queue.is_fetching(sequence)
    loads.queue.poll(load.deadline_s)
    assert not loads.queue.is_fetching(sequence)
    assert source.rate.tokens_per_s(time.monotonic()) < 10
    assert not loads.start(sequence), "it is computed"
    loads.assert_idle()
    before = [bytes(block) for block in loads.copier.blocks]
    source.gate.set()
    wait_until(lambda: load.finished)
    assert [bytes(block) for block in loads.copier.blocks] == before, "a late block is written nowhere"
    assert loads.num_cached(sequence) == 0


def test_what_came_before_the_deadline_stays(make_loads) -> None:
    source = Source()
    source.gate.clear()
    source.hangs_at = 2
    loads = make_loads(source)
    sequence = loads.sequence(4)
    assert loads.start(sequence)
    for _ in range(3):
        source.entered.acquire()
    loads.queue.poll(loads.queue.active[0].deadline_s)
    assert loads.num_cached(sequence) == 2
    assert sequence.fetched_tokens(BLOCK_SIZE) == {"s0": 2 * BLOCK_SIZE}
    loads.assert_idle()


def test_a_reader_that_hangs_after_its_last_block_delays_nothing(make_loads) -> None:
    """All has arrived, but its connection does not close: a deadline that passes then blames no place."""
    source = Source()
    source.close_gate.clear()
    loads = make_loads(source)
    sequence = loads.sequence(3)
    assert loads.start(sequence)
    source.closing.acquire()
    loads.queue.poll(loads.queue.active[0].deadline_s)
    assert loads.num_cached(sequence) == 3
    loads.assert_idle()
    assert loads.ended[0].num_arrived == 3


@pytest.mark.parametrize("error", [OSError("gone"), MemoryError(), ValueError(), None])
def test_a_reader_that_fails_leaves_what_it_read(make_loads, error: Exception | None) -> None:
    source = Source()
    source.fails_at, source.error = 2, error
    loads = make_loads(source, num_threads=1)
    for last in range(3):  # its only thread survives
        sequence = loads.sequence(4, last)
        assert loads.start(sequence)
        assert loads.run(sequence) == 2
    loads.assert_idle()


def test_a_place_that_cannot_be_opened(make_loads) -> None:
    source = Source()

    def refuse(links: Sequence[ChainLink]) -> AbstractContextManager[Source]:
        raise ConnectionRefusedError

    source.open = refuse  # type: ignore[method-assign]
    loads = make_loads(source)
    sequence = loads.sequence(4)
    assert loads.start(sequence)
    assert loads.run(sequence) == 0
    loads.assert_idle()


def test_others_wait_while_all_threads_hang_then_compute(make_loads) -> None:
    source = Source()
    source.gate.clear()
    loads = make_loads(source, num_threads=1)
    first, second, third = (loads.sequence(1 + n, n) for n in range(3))
    assert loads.start(first)
    assert loads.start(second)
    assert not loads.queue.is_fetching(second), "it has none yet, and asks again at every step"
    assert loads.queue.num_active == 1
    loads.queue.poll(loads.queue.active[0].deadline_s)
    assert not loads.start(second)
    assert not loads.start(third), "the place counts as slow now"
    loads.assert_idle()
    source.gate.set()


def test_a_load_behind_a_thread_that_hangs_ends_by_its_deadline(make_loads) -> None:
    hanging, healthy = Source(num_held=2), Source(num_held=4)
    hanging.gate.clear()
    loads = make_loads(hanging, healthy, num_threads=1)
    first = loads.sequence(2)
    assert loads.start(first)
    hanging.entered.acquire()
    loads.queue.give_up_latest()
    hanging.num_held = 0
    second = loads.sequence(4, 1)
    assert loads.start(second)
    loads.queue.poll(loads.queue.active[0].deadline_s)
    assert not loads.queue.is_fetching(second)
    loads.assert_idle()


def test_two_sequences_with_a_common_prefix_load_it_once(make_loads) -> None:
    source = Source()
    source.gate.clear()
    loads = make_loads(source)
    one, other = loads.sequence(5, 1), loads.sequence(5, 2)
    assert loads.start(one)
    assert loads.start(other)
    assert loads.queue.num_active == 1
    assert loads.queue.is_fetching(other)
    source.gate.set()
    assert loads.run(one) == 5
    assert loads.num_cached(other) == 4
    assert loads.start(other), "the rest is its own"
    assert loads.run(other) == 5
    assert len(source.read_blocks) == len(set(source.read_blocks)) == 6
    assert other.fetched_tokens(BLOCK_SIZE) == {"s0": BLOCK_SIZE}
    loads.assert_idle()


def test_the_wait_for_an_adopted_chain_is_bounded(make_loads) -> None:
    """A sequence waits no longer than it takes to compute the chain."""
    source = Source()
    source.gate.clear()
    loads = make_loads(source, prefill_tokens_per_s=1000)
    sequence = loads.sequence(4)
    hashes = sequence.hash_blocks(BLOCK_SIZE)
    begun_s = time.monotonic()
    adopted = FetchSource("peer", 0, 4, source.rate, source.open)
    load = loads.queue.fetch_chain(ROOT, hashes, adopted, begun_s + 1e6)
    assert load is not None
    assert loads.start(sequence)
    assert load.deadline_s < time.monotonic() + HANG_S
    loads.queue.poll(load.deadline_s)
    assert not loads.queue.is_fetching(sequence)
    loads.assert_idle()


def test_a_fetch_given_up_during_a_write_ends_after_that_block(make_loads) -> None:
    source = Source()
    loads = make_loads(source)
    writing, go_on = threading.Event(), threading.Event()
    write = loads.copier.write
    written: list[BlockId] = []

    def slowly(block_id: BlockId, payload: memoryview) -> None:
        writing.set()
        assert go_on.wait(HANG_S)
        write(block_id, payload)
        written.append(block_id)

    loads.queue._pool.write = slowly
    sequence = loads.sequence(4)
    assert loads.start(sequence)
    assert writing.wait(HANG_S)
    (load,) = loads.queue.active
    end = threading.Thread(target=loads.queue.give_up_latest)
    end.start()
    wait_until(lambda: load.lock.locked())
    assert loads.queue.num_active == 1, "not while a thread writes into its blocks"
    go_on.set()
    end.join(HANG_S)
    assert not end.is_alive()
    num_written = len(written)
    wait_until(lambda: load.finished)
    assert len(written) == num_written, "nothing is written after the end"
    assert loads.num_cached(sequence) == num_written
    loads.assert_idle()


def test_nothing_is_loaded_where_computing_is_faster(make_loads) -> None:
    loads = make_loads(Source(tokens_per_s=100), prefill_tokens_per_s=1000)
    sequence = loads.sequence(6)
    assert loads.queue.count_fetchable(sequence, 0) == 0
    assert not loads.start(sequence)
    loads.assert_idle()


def test_a_slow_place_is_left_out_behind_a_fast_one(make_loads) -> None:
    slow = Source(num_held=6, tokens_per_s=100)
    loads = make_loads(Source(num_held=2), slow, prefill_tokens_per_s=1000)
    sequence = loads.sequence(6)
    assert loads.queue.count_fetchable(sequence, 0) == 2
    assert loads.start(sequence)
    assert loads.run(sequence) == 2
    assert slow.read_blocks == []


def test_no_more_is_reserved_than_is_free(make_loads) -> None:
    loads = make_loads(Source())
    held = loads.allocator.allocate(BLOCK_SIZE * (NUM_BLOCKS - 3), [], ROOT, reuse=False)
    assert held is not None
    sequence = loads.sequence(5)
    assert not loads.start(sequence)
    held.free()
    loads.assert_idle()
