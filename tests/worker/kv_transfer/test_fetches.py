"""Fetches whose readers hang, lag, raise or take turns: the engine thread goes on, and the pool stays its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import pytest
from msgspec import structs

from cache.allocators.hash import HashAllocator
from cache.types import BlockHash, BlockId, ChainLink
from tests.waiting import HANG_S, wait_until
from tests.worker.kv_transfer.moving_engine import BLOCK_SIZE, BytesCopier
from tests.worker.scheduler.engine import ROOT, generate
from worker.contracts.engine import RequestKey
from worker.contracts.rates import PrefillRate, TransferRate
from worker.kv_transfer.fetches import FetchQueue, FetchSource, PrefixFetch
from worker.kv_transfer.pool_blocks import PoolBlocks
from worker.scheduler.request import Request, TokenSequence, split_into_sequences
from worker.wire import BlockSource

NUM_BLOCKS = 33


class Source:
    """A place whose reads the test gates. It has the first `num_held` blocks of any chain."""

    def __init__(self, num_held: int = 100, tokens_per_s: float = 1e6, *, is_open: bool = True) -> None:
        """Its reads wait for the gate unless it `is_open`."""
        self.num_held = num_held
        self.rate = TransferRate(tokens_per_s)
        self.gate = threading.Event()
        if is_open:
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

    def read(self, link: ChainLink, payload: memoryview, use: Callable[[memoryview], object]) -> bool:
        self.entered.release()
        if link.depth >= self.hangs_at:
            assert self.gate.wait(HANG_S)
        if link.depth >= self.fails_at:
            if self.error is not None:
                raise self.error
            return False
        payload[:] = link.block_hash
        use(payload)
        self.read_blocks.append(link.block_hash)
        return True


class Fetches:
    """A queue with its threads, over a pool of bytes."""

    def __init__(self, *sources: Source, num_threads: int = 2, prefill_tokens_per_s: int = 10) -> None:
        self.allocator = HashAllocator(NUM_BLOCKS, BLOCK_SIZE)
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

    def fetched_tokens(self, sequence: TokenSequence) -> dict[str, int] | None:
        return sequence.fetched_tokens(self.num_cached(sequence), BLOCK_SIZE)

    def start(self, sequence: TokenSequence) -> bool:
        return self.queue.start(sequence, self.num_cached(sequence))

    def run(self, sequence: TokenSequence) -> int:
        """Poll until the sequence no longer waits. Return the blocks that it finds."""
        wait_until(lambda: self.queue.poll(0.0) or not sequence.is_fetching)
        return self.num_cached(sequence)

    def assert_idle(self) -> None:
        assert self.queue.active == []
        assert self.allocator.num_free_blocks == NUM_BLOCKS - 1
        self.allocator.check_integrity()


@pytest.fixture
def make_fetches() -> Iterator[Callable[..., Fetches]]:
    made: list[Fetches] = []

    def make(*sources: Source, **options: int) -> Fetches:
        made.append(Fetches(*sources, **options))
        return made[-1]

    yield make
    for fetches in made:
        for source in fetches.sources:
            source.gate.set()
            source.close_gate.set()
        fetches.queue.stop()


def test_what_is_fetched_is_found(make_fetches) -> None:
    fetches = make_fetches(Source(num_held=3), Source(num_held=5))
    sequence = fetches.sequence(6)
    assert fetches.start(sequence)
    assert sequence.is_fetching
    assert fetches.run(sequence) == 5
    assert fetches.fetched_tokens(sequence) == {"s0": 3 * BLOCK_SIZE, "s1": 2 * BLOCK_SIZE}
    assert not fetches.start(sequence), "once is enough"
    fetches.assert_idle()


def test_fetched_blocks_that_were_evicted_do_not_count(make_fetches) -> None:
    """A sequence for which the batch has no place may be admitted long after its fetch."""
    fetches = make_fetches(Source(num_held=3), Source(num_held=5))
    sequence = fetches.sequence(6)
    assert fetches.start(sequence)
    assert fetches.run(sequence) == 5
    held = fetches.allocator.allocate(BLOCK_SIZE * (NUM_BLOCKS - 1 - 4), [], ROOT, reuse=False)
    assert held is not None
    assert fetches.num_cached(sequence) == 4
    assert fetches.fetched_tokens(sequence) == {"s0": 3 * BLOCK_SIZE, "s1": BLOCK_SIZE}
    held.free()


def test_a_reader_that_hangs_ends_the_fetch_late(make_fetches) -> None:
    """Its place counts as slow."""
    source = Source(is_open=False)
    fetches = make_fetches(source)
    sequence = fetches.sequence(4)
    assert fetches.start(sequence)
    source.entered.acquire()
    (fetch,) = fetches.queue.active
    fetches.queue.poll(fetch.deadline_s - 1e-3)
    assert sequence.is_fetching
    fetches.queue.poll(fetch.deadline_s)
    assert not sequence.is_fetching
    assert source.rate.tokens_per_s(time.monotonic()) < 10
    assert not fetches.start(sequence), "it is computed"
    fetches.assert_idle()
    before = [bytes(block) for block in fetches.copier.blocks]
    source.gate.set()
    wait_until(lambda: fetch.finished)
    assert [bytes(block) for block in fetches.copier.blocks] == before, "a late block is written nowhere"
    assert fetches.num_cached(sequence) == 0


@pytest.mark.parametrize(
    ("prefill_tokens_per_s", "tokens_per_s", "timeout_s"),
    [
        pytest.param(10, 16.0, 1.6, id="computing is quicker than lag"),
        pytest.param(10, 160.0, 0.9, id="four times what it takes, and half a second"),
        pytest.param(1000, 1e6, 0.5, id="at least half a second"),
    ],
)
def test_a_fetch_is_late_by_the_blocks_that_it_brings(
    make_fetches: Callable[..., Fetches], prefill_tokens_per_s: int, tokens_per_s: float, timeout_s: float
) -> None:
    """Four blocks, which are 16 tokens. What was cached before counts neither way."""
    source = Source(num_held=2)
    fetches = make_fetches(source, prefill_tokens_per_s=prefill_tokens_per_s)
    before = fetches.sequence(3)
    assert fetches.start(before)
    assert fetches.run(before) == 2
    source.num_held, source.rate = 6, TransferRate(tokens_per_s)
    source.gate.clear()
    begun_s = time.monotonic()
    assert fetches.start(fetches.sequence(6))
    now_s = time.monotonic()
    (fetch,) = fetches.queue.active
    assert begun_s + timeout_s - 1e-6 < fetch.deadline_s < now_s + timeout_s + 1e-6


def test_a_deadline_interrupts_a_reader_that_waits(make_fetches) -> None:
    source = Source(is_open=False)
    source.interrupt = source.gate.set  # type: ignore[attr-defined]
    fetches = make_fetches(source)
    assert fetches.start(fetches.sequence(4))
    assert source.entered.acquire(timeout=HANG_S)
    fetches.queue.poll(fetches.queue.active[0].deadline_s)
    assert source.closing.acquire(timeout=HANG_S), "its thread is free"
    fetches.assert_idle()


def test_what_came_before_the_deadline_stays(make_fetches) -> None:
    source = Source(is_open=False)
    source.hangs_at = 2
    fetches = make_fetches(source)
    sequence = fetches.sequence(4)
    assert fetches.start(sequence)
    for _ in range(3):
        source.entered.acquire()
    fetches.queue.poll(fetches.queue.active[0].deadline_s)
    assert fetches.num_cached(sequence) == 2
    assert fetches.fetched_tokens(sequence) == {"s0": 2 * BLOCK_SIZE}
    fetches.assert_idle()


def test_a_reader_that_hangs_after_its_last_block_delays_nothing(make_fetches) -> None:
    """All has arrived, but its connection does not close: a deadline that passes then blames no place."""
    source = Source()
    source.close_gate.clear()
    fetches = make_fetches(source)
    sequence = fetches.sequence(3)
    assert fetches.start(sequence)
    source.closing.acquire()
    fetches.queue.poll(fetches.queue.active[0].deadline_s)
    assert fetches.num_cached(sequence) == 3
    assert source.rate.tokens_per_s(time.monotonic()) == 1e6
    fetches.assert_idle()
    assert fetches.ended[0].num_arrived == 3


@pytest.mark.parametrize("error", [OSError("gone"), MemoryError(), ValueError(), None])
def test_a_reader_that_fails_leaves_what_it_read(make_fetches, error: Exception | None) -> None:
    source = Source()
    source.fails_at, source.error = 2, error
    fetches = make_fetches(source, num_threads=1)
    for last in range(3):  # its only thread survives
        sequence = fetches.sequence(4, last)
        assert fetches.start(sequence)
        assert fetches.run(sequence) == 2
    fetches.assert_idle()


def test_a_place_that_cannot_be_opened(make_fetches) -> None:
    source = Source()

    def refuse(links: Sequence[ChainLink]) -> AbstractContextManager[Source]:
        raise ConnectionRefusedError

    source.open = refuse  # type: ignore[method-assign]
    fetches = make_fetches(source)
    sequence = fetches.sequence(4)
    assert fetches.start(sequence)
    assert fetches.run(sequence) == 0
    fetches.assert_idle()


def test_others_wait_while_all_threads_hang_then_compute(make_fetches) -> None:
    source = Source(is_open=False)
    fetches = make_fetches(source, num_threads=1)
    first, second, third = (fetches.sequence(1 + n, n) for n in range(3))
    assert fetches.start(first)
    assert fetches.start(second)
    assert not second.is_fetching, "it has none yet, and asks again at every step"
    assert len(fetches.queue.active) == 1
    fetches.queue.poll(fetches.queue.active[0].deadline_s)
    assert not fetches.start(second)
    assert not fetches.start(third), "the place counts as slow now"
    fetches.assert_idle()
    source.gate.set()


def test_a_fetch_behind_a_thread_that_hangs_ends_by_its_deadline(make_fetches) -> None:
    hanging, healthy = Source(num_held=2, is_open=False), Source(num_held=4)
    fetches = make_fetches(hanging, healthy, num_threads=1)
    first = fetches.sequence(2)
    assert fetches.start(first)
    hanging.entered.acquire()
    fetches.queue.give_up_latest()
    hanging.num_held = 0
    second = fetches.sequence(4, 1)
    assert fetches.start(second)
    fetches.queue.poll(fetches.queue.active[0].deadline_s)
    assert not second.is_fetching
    fetches.assert_idle()


def test_two_sequences_with_a_common_prefix_fetch_it_once(make_fetches) -> None:
    source = Source(is_open=False)
    fetches = make_fetches(source)
    one, other = fetches.sequence(5, 1), fetches.sequence(5, 2)
    assert fetches.start(one)
    assert fetches.start(other)
    assert len(fetches.queue.active) == 1
    assert other.is_fetching
    source.gate.set()
    assert fetches.run(one) == 5
    assert fetches.num_cached(other) == 4
    assert fetches.start(other), "the rest is its own"
    assert fetches.run(other) == 5
    assert len(source.read_blocks) == len(set(source.read_blocks)) == 6
    assert fetches.fetched_tokens(other) == {"s0": BLOCK_SIZE}
    fetches.assert_idle()


def test_what_may_reuse_nothing_waits_for_no_fetch(make_fetches) -> None:
    source = Source(is_open=False)
    fetches = make_fetches(source)
    assert fetches.start(fetches.sequence(4))
    whole = fetches.sequence(4)
    whole.request.prompt_logprobs = []
    assert not fetches.start(whole)
    assert fetches.queue.count_fetchable(whole, 0) == 0


def test_a_short_sequence_does_not_cut_the_fetch_of_a_long_one(make_fetches) -> None:
    """It waits for its own blocks only, and no longer than it takes to compute them."""
    source = Source(is_open=False)
    source.hangs_at = 1
    fetches = make_fetches(source)
    assert fetches.start(fetches.sequence(12))
    (fetch,) = fetches.queue.active
    deadline_s = fetch.deadline_s
    short, late = fetches.sequence(2, last=7), fetches.sequence(3, last=7)
    for sequence in (short, late):
        assert fetches.start(sequence)
        assert sequence.is_fetching
    assert fetch.deadline_s == deadline_s
    fetches.run(short)
    assert fetches.queue.active == [fetch], "the rest still comes"
    assert late.is_fetching
    late.fetch = replace(late.fetch, limit_s=0.0)
    assert not late.is_fetching
    assert not fetches.start(late), "it is computed"


def test_the_wait_for_an_adopted_chain_is_bounded(make_fetches) -> None:
    """A sequence waits no longer than it takes to compute the chain."""
    source = Source(is_open=False)
    fetches = make_fetches(source, prefill_tokens_per_s=1000)
    sequence = fetches.sequence(4)
    hashes = sequence.hash_blocks(BLOCK_SIZE)
    begun_s = time.monotonic()
    adopted = FetchSource("peer", 0, 4, source.rate, source.open)
    fetch = fetches.queue.fetch_chain(ROOT, hashes, adopted, begun_s + 1e6)
    assert fetch is not None
    assert fetches.start(sequence)
    assert fetch.deadline_s < time.monotonic() + HANG_S
    fetches.queue.poll(fetch.deadline_s)
    assert not sequence.is_fetching
    fetches.assert_idle()


def test_a_request_with_a_peer_takes_over_a_background_fetch(make_fetches) -> None:
    """The peer sends slowly in the background. What has come stays, and does not count as the peer's rate."""
    slow, fast = Source(is_open=False), Source()
    slow.hangs_at = 2
    fetches = make_fetches(fast)
    sequence = fetches.sequence(5)
    hashes = sequence.hash_blocks(BLOCK_SIZE)
    adopted = FetchSource("peer", 0, 5, slow.rate, slow.open)
    fetch = fetches.queue.fetch_chain(ROOT, hashes, adopted, time.monotonic() + 1e6)
    assert fetch is not None
    wait_until(lambda: len(slow.read_blocks) == 2 and fetch.num_arrived == 2)
    sequence.request.wire = structs.replace(sequence.request.wire, source=BlockSource("http://peer", "e", 5))
    assert fetches.start(sequence)
    assert fetch.ended
    assert fetches.run(sequence) == 5
    assert fetches.fetched_tokens(sequence) == {"s0": 3 * BLOCK_SIZE}
    slow.gate.set()
    assert slow.closing.acquire(timeout=HANG_S)
    assert slow.rate.tokens_per_s(time.monotonic()) == 1e6
    fetches.assert_idle()


def test_a_fetch_given_up_during_a_write_ends_after_that_block(make_fetches) -> None:
    source = Source()
    fetches = make_fetches(source)
    writing, go_on = threading.Event(), threading.Event()
    write = fetches.copier.write
    written: list[BlockId] = []

    def slowly(block_id: BlockId, payload: memoryview) -> None:
        writing.set()
        assert go_on.wait(HANG_S)
        write(block_id, payload)
        written.append(block_id)

    fetches.queue._pool.write = slowly
    sequence = fetches.sequence(4)
    assert fetches.start(sequence)
    assert writing.wait(HANG_S)
    (fetch,) = fetches.queue.active
    end = threading.Thread(target=fetches.queue.give_up_latest)
    end.start()
    wait_until(lambda: fetch.lock.locked())
    assert len(fetches.queue.active) == 1, "not while a thread writes into its blocks"
    go_on.set()
    end.join(HANG_S)
    assert not end.is_alive()
    num_written = len(written)
    wait_until(lambda: fetch.finished)
    assert len(written) == num_written, "nothing is written after the end"
    # The reader's answer counts: the end may come between it and the write, and then the block is lost.
    assert num_written - fetches.num_cached(sequence) in (0, 1)
    fetches.assert_idle()


def test_nothing_is_fetched_where_computing_is_faster(make_fetches) -> None:
    fetches = make_fetches(Source(tokens_per_s=100), prefill_tokens_per_s=1000)
    sequence = fetches.sequence(6)
    assert fetches.queue.count_fetchable(sequence, 0) == 0
    assert not fetches.start(sequence)
    fetches.assert_idle()


def test_a_slow_place_is_left_out_behind_a_fast_one(make_fetches) -> None:
    slow = Source(num_held=6, tokens_per_s=100)
    fetches = make_fetches(Source(num_held=2), slow, prefill_tokens_per_s=1000)
    sequence = fetches.sequence(6)
    assert fetches.queue.count_fetchable(sequence, 0) == 2
    assert fetches.start(sequence)
    assert fetches.run(sequence) == 2
    assert slow.read_blocks == []


def test_no_more_is_reserved_than_is_free(make_fetches) -> None:
    fetches = make_fetches(Source())
    held = fetches.allocator.allocate(BLOCK_SIZE * (NUM_BLOCKS - 3), [], ROOT, reuse=False)
    assert held is not None
    sequence = fetches.sequence(5)
    assert not fetches.start(sequence)
    held.free()
    fetches.assert_idle()
