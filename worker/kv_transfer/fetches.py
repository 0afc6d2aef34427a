"""Fetches: blocks of a prefix on their way into the pool, while the sequence that needs them waits and others run.

    engine thread   start: reserve blocks -> | poll: make findable what has arrived | -> end: release the reservation
    fetch thread                              read a record, check it, fill a reserved block, and so on

A fetched block is a cached block like any other: the sequence finds it when it is admitted. A fetch that fails, is
late or is given up only costs time. The thread writes into the pool under the fetch's lock, and never after its end.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from cache.allocators.hash import HashAllocation, HashAllocator
from cache.types import BlockHash, ChainLink
from worker.contracts.rates import PrefillRate, TransferRate
from worker.kv_transfer.pool_blocks import PoolBlocks
from worker.scheduler.request import TokenSequence

logger = logging.getLogger(__name__)

NUM_THREADS: Final = 4  # each runs one fetch; further sequences wait for a thread
_LAG_FACTOR: Final = 4.0  # see _LAG_S
_LAG_S: Final = 0.5
"""A fetch is late after 4 times its expected time plus this. Computing the blocks instead must not be quicker."""


class BlockReader(Protocol):
    """Blocks of a chain, read in its order. One that may wait also has `interrupt`: then its read fails at once."""

    def read(self, link: ChainLink, payload: memoryview, use: Callable[[memoryview], object]) -> bool:
        """Give the block to `use`, in `payload` or in place. False: a miss, and what was copied is undefined."""


@dataclass(frozen=True, slots=True)
class FetchSource:
    """A place from which blocks `start` to `stop` of a chain can come."""

    place: str
    start: int
    stop: int
    rate: TransferRate
    open: Callable[[Sequence[ChainLink]], AbstractContextManager[BlockReader]]
    """Begin to read these blocks, in the fetch's thread. May raise anything."""


@dataclass(slots=True, eq=False)
class PrefixFetch:
    """One fetch, of the blocks after those that its allocation found in the pool."""

    links: Sequence[ChainLink]
    """The whole chain up to the last block to fetch."""
    sources: Sequence[FetchSource]
    allocation: HashAllocation
    started_s: float
    deadline_s: float
    num_arrived: int
    """Blocks of the chain that are in the pool. Under `lock`, like `ended`."""
    in_background: bool = False
    """No sequence waited for it when it began."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: bool = False
    """Nothing may be written after this. Set by the engine thread."""
    finished: bool = False
    """The thread has nothing left to read."""
    interrupt: Callable[[], None] | None = None
    """The method of the thread's reader, if it may wait. Under `lock`."""

    def num_fetched_blocks(self, num_cached: int) -> dict[str, int]:
        """Return the blocks that came and are among the first `num_cached` of the chain, by place."""
        counts = {each.place: min(self.num_arrived, num_cached, each.stop) - each.start for each in self.sources}
        return {place: count for place, count in counts.items() if count > 0}


@dataclass(frozen=True, slots=True)
class SharedFetch:
    """The wait of a sequence for the first `num_needed` blocks of another's fetch, until `limit_s` at most."""

    fetch: PrefixFetch
    num_needed: int
    limit_s: float

    @property
    def ended(self) -> bool:
        is_over = self.fetch.ended or self.fetch.allocation.num_filled >= self.num_needed
        return is_over or time.monotonic() >= self.limit_s

    def num_fetched_blocks(self, num_cached: int) -> dict[str, int]:
        return {}


@dataclass(eq=False)
class FetchQueue:
    """The fetches of an engine: a `worker.scheduler.prefix_wait.PrefixFetcher`. Owned by the engine thread."""

    _allocator: HashAllocator
    _pool: PoolBlocks
    _prefill_rate: PrefillRate
    _sources: Callable[[TokenSequence, Sequence[BlockHash], int], list[FetchSource]]
    """Lists the places of the blocks after the first n, in the order of the chain."""
    _on_end: Callable[[PrefixFetch], None] = lambda fetch: None
    """Receives every fetch that has ended."""
    _wake: Callable[[], None] = lambda: None
    """Makes the engine thread call `poll` soon. Any thread."""
    num_threads: int = NUM_THREADS
    active: list[PrefixFetch] = field(default_factory=list, init=False)
    _fetches: dict[BlockHash, PrefixFetch] = field(default_factory=dict, init=False)
    """Active fetches by the blocks that they bring."""
    _jobs: queue.SimpleQueue[PrefixFetch | None] = field(default_factory=queue.SimpleQueue, init=False)

    def start_threads(self) -> None:
        for number in range(self.num_threads):
            threading.Thread(target=self._run, name=f"fetch-{number}", daemon=True).start()

    def start(self, sequence: TokenSequence, num_cached_blocks: int) -> bool:
        if sequence.has_fetched:
            return False
        hashes = sequence.reusable_hashes(self._allocator.block_size)
        if num_cached_blocks >= len(hashes):
            return False
        other = self._fetches.get(hashes[num_cached_blocks])
        if other is not None and other.in_background and sequence.request.wire.source is not None:
            self._end(other)  # a background fetch is slow, and this request names a peer that sends at once
            return self.start(sequence, sequence.count_cached(self._allocator) // self._allocator.block_size)
        if other is not None:  # it is being fetched already, for another sequence or a peer's hand-over
            return self._share(sequence, hashes, num_cached_blocks, other)
        sources, seconds = self._choose(sequence, hashes, num_cached_blocks)
        if sources and len(self.active) >= self.num_threads:  # each of them ends soon, by its deadline at the latest
            return True
        sequence.has_fetched = True
        if not sources:
            return False
        first, stop = sources[0].start, sources[-1].stop
        compute_s = self._prefill_rate.seconds((stop - first) * self._allocator.block_size)
        timeout_s = max(_LAG_S, min(compute_s, _LAG_FACTOR * seconds + _LAG_S))
        sequence.fetch = self._reserve(sequence.root, hashes[:stop], sources, time.monotonic() + timeout_s)
        return sequence.fetch is not None

    def count_fetchable(self, sequence: TokenSequence, num_cached_blocks: int) -> int:
        hashes = sequence.reusable_hashes(self._allocator.block_size)
        sources, _ = self._choose(sequence, hashes, num_cached_blocks)
        return sources[-1].stop - num_cached_blocks if sources else 0

    def give_up_latest(self) -> bool:
        if not self.active:
            return False
        self._end(self.active[-1])
        return True

    def give_up_all(self) -> None:
        while self.give_up_latest():
            pass

    def fetch_chain(
        self, root: BlockHash, hashes: Sequence[BlockHash], source: FetchSource, deadline_s: float
    ) -> PrefixFetch | None:
        """Fetch a chain for no sequence, from one source. None: it is present, or no thread or space is free."""
        is_busy = len(self.active) > self.num_threads // 2 or any(each in self._fetches for each in hashes)
        if is_busy or source.start >= source.stop:
            return None
        return self._reserve(root, hashes, [source], deadline_s, in_background=True)

    def poll(self, now_s: float) -> None:
        """Make findable what has arrived. End the fetches that are complete or late."""
        for fetch in self.active.copy():
            fetch.allocation.fill(fetch.num_arrived)
            unfinished = next((source for source in fetch.sources if fetch.num_arrived < source.stop), None)
            if fetch.finished or unfinished is None:
                self._end(fetch)
            elif now_s >= fetch.deadline_s:
                self._end(fetch)
                if not fetch.in_background:
                    unfinished.rate.add(0, now_s - fetch.started_s, now_s)

    def stop(self) -> None:
        self.give_up_all()
        for _ in range(self.num_threads):
            self._jobs.put(None)

    # --- on the engine thread -----------------------------------------------------------------------------------

    def _choose(
        self, sequence: TokenSequence, hashes: Sequence[BlockHash], num_cached: int
    ) -> tuple[list[FetchSource], float]:
        """Return the sources to fetch from, and the seconds it takes. Leaves out sources slower than computing."""
        best: tuple[float, int, float] = (0.0, 0, 0.0)
        gain_s, fetch_s = 0.0, 0.0
        sources = self._sources(sequence, hashes, num_cached)
        for number, source in enumerate(sources, 1):
            num_tokens = (source.stop - source.start) * self._allocator.block_size
            seconds = source.rate.seconds(num_tokens, time.monotonic())
            fetch_s += seconds
            gain_s += self._prefill_rate.seconds(num_tokens) - seconds
            if gain_s > best[0]:
                best = (gain_s, number, fetch_s)
        return sources[: best[1]], best[2]

    def _share(self, sequence: TokenSequence, hashes: Sequence[BlockHash], num_cached: int, other: PrefixFetch) -> bool:
        """Wait for blocks that another fetch brings. False: the wait for them is over."""
        if isinstance(sequence.fetch, SharedFetch) and sequence.fetch.fetch is other:
            sequence.has_fetched = True
            return False
        compute_s = self._prefill_rate.seconds((len(hashes) - num_cached) * self._allocator.block_size)
        limit_s = time.monotonic() + max(_LAG_S, compute_s)
        if other.in_background:
            other.deadline_s = min(other.deadline_s, limit_s)
        num_shared = sum(self._fetches.get(each) is other for each in hashes[num_cached:])
        sequence.fetch = SharedFetch(other, num_cached + num_shared, limit_s)
        return True

    def _reserve(
        self,
        root: BlockHash,
        hashes: Sequence[BlockHash],
        sources: Sequence[FetchSource],
        deadline_s: float,
        *,
        in_background: bool = False,
    ) -> PrefixFetch | None:
        allocation = self._allocator.reserve(root, hashes)
        if allocation is None:
            return None
        links = [ChainLink(each, hashes[n - 1] if n else root, n) for n, each in enumerate(hashes)]
        begun_s, num_filled = time.monotonic(), allocation.num_filled
        fetch = PrefixFetch(links, sources, allocation, begun_s, deadline_s, num_filled, in_background)
        self.active.append(fetch)
        self._fetches.update(dict.fromkeys(hashes[sources[0].start :], fetch))
        self._jobs.put(fetch)
        return fetch

    def _end(self, fetch: PrefixFetch) -> None:
        with fetch.lock:  # the thread holds it while it fills one block
            fetch.ended = True
            if fetch.interrupt is not None:
                fetch.interrupt()
        fetch.allocation.fill(fetch.num_arrived)
        fetch.allocation.free()
        self.active.remove(fetch)
        for link in fetch.links[fetch.sources[0].start :]:
            if self._fetches.get(link.block_hash) is fetch:
                del self._fetches[link.block_hash]
        self._on_end(fetch)

    # --- on a fetch thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        payload: memoryview | None = None
        while (fetch := self._jobs.get()) is not None:
            try:
                payload = payload or self._pool.new_payload()
                for _ in self.read_blocks(fetch, payload):
                    pass
            except Exception as error:
                if not fetch.ended:
                    logger.warning("a fetch was cut short: %s", error or type(error).__name__)
            fetch.finished = True
            self._wake()

    def read_blocks(self, fetch: PrefixFetch, payload: memoryview) -> Iterator[None]:
        """Read blocks into the pool, one a turn, up to the first miss or the end of the fetch. May raise anything."""
        for source in fetch.sources:
            links = fetch.links[source.start : source.stop]
            begun_s, num_read = time.monotonic(), 0
            try:
                with source.open(links) as reader:
                    with fetch.lock:
                        fetch.interrupt = getattr(reader, "interrupt", None)
                    for link in links:
                        copy = partial(self._copy, fetch, link)
                        if fetch.ended or not reader.read(link, payload, copy) or not self._arrived(fetch, link):
                            return
                        num_read += 1
                        yield
            finally:
                if num_read and not fetch.in_background:  # neither a miss nor a background fetch measures the rate
                    now_s = time.monotonic()
                    source.rate.add(num_read * self._allocator.block_size, now_s - begun_s, now_s)

    def _copy(self, fetch: PrefixFetch, link: ChainLink, payload: memoryview) -> None:
        """Write a block into the pool, unless the fetch has ended and owns no blocks."""
        with fetch.lock:
            if not fetch.ended:
                self._pool.write(fetch.allocation.block_table[link.depth], payload)

    def _arrived(self, fetch: PrefixFetch, link: ChainLink) -> bool:
        """Count a block whose reader was right. False: the fetch has ended."""
        with fetch.lock:
            if not fetch.ended:
                fetch.num_arrived = link.depth + 1
            return not fetch.ended
