"""Loads: blocks of a prefix on their way into the pool, while the sequence that needs them waits and others run.

    engine thread   start: reserve blocks -> | poll: make findable what has arrived | -> end: release the reservation
    load thread                              read a record, check it, fill a reserved block, and so on

A loaded block is a cached block like any other: the sequence finds it when it is admitted. So a load that fails, lags
or is given up costs time only. The thread writes into the pool under the load's lock, and never after its end.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

from cache.allocators.hash import HashAllocation, HashAllocator
from cache.store import ChainLink
from cache.types import BlockHash
from worker.engine.rates import PrefillRate, TransferRate
from worker.kv_transfer.pool_blocks import PoolBlocks
from worker.scheduler.request import TokenSequence

logger = logging.getLogger(__name__)

NUM_THREADS: Final = 4
_LAG_FACTOR: Final = 4.0
_LAG_S: Final = 0.5
"""A load lags behind when it takes 4 times as long as expected and half a second."""


class BlockReader(Protocol):
    """Blocks of a chain, read in its order."""

    def read(self, link: ChainLink, payload: memoryview) -> bool:
        """Fill `payload` with the block. False: a miss."""


@runtime_checkable
class Interruptible(Protocol):
    """A reader that may wait for others."""

    def interrupt(self) -> None:
        """Let a read that waits fail at once. Any thread."""


@dataclass(frozen=True, slots=True)
class LoadSource:
    """A place from which blocks `start` to `stop` of a chain can come."""

    place: str
    start: int
    stop: int
    rate: TransferRate
    open: Callable[[Sequence[ChainLink]], AbstractContextManager[BlockReader]]
    """Begin to read these blocks, in the load's thread. May raise anything."""


@dataclass(slots=True, eq=False)
class PrefixLoad:
    """One load, of the blocks after those that its allocation found in the pool."""

    links: Sequence[ChainLink]
    """The whole chain up to the last block to load."""
    sources: Sequence[LoadSource]
    allocation: HashAllocation
    started_s: float
    deadline_s: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    num_arrived: int = 0
    """Blocks of the chain that are in the pool. Under `lock`, like `ended`."""
    ended: bool = False
    """Nothing may be written any more. Set by the engine thread."""
    finished: bool = False
    """The thread has no more to read."""
    waits_at: Interruptible | None = None
    """The reader of the thread, if it may wait. Under `lock`."""

    def num_fetched_blocks(self) -> dict[str, int]:
        """Return the blocks that came, by place."""
        counts = {source.place: min(self.num_arrived, source.stop) - source.start for source in self.sources}
        return {place: count for place, count in counts.items() if count > 0}


class LoadQueue:
    """The loads of an engine: a `worker.scheduler.prefix_wait.PrefixFetcher`. Owned by the engine thread."""

    def __init__(
        self,
        allocator: HashAllocator,
        pool: PoolBlocks,
        prefill_rate: PrefillRate,
        sources: Callable[[TokenSequence, Sequence[BlockHash], int], list[LoadSource]],
        ended: Callable[[PrefixLoad], None] = lambda load: None,
        *,
        num_threads: int = NUM_THREADS,
    ) -> None:
        """`sources` lists, in the order of the chain, the places from which its blocks after the first n can come.

        `ended` receives every load that has ended.
        """
        self._allocator = allocator
        self._pool = pool
        self._prefill_rate = prefill_rate
        self._sources = sources
        self.wake: Callable[[], None] = lambda: None
        """Makes the engine thread call `poll` soon. Any thread calls it."""
        self._ended = ended
        self.active: list[PrefixLoad] = []
        self._loads: dict[BlockHash, PrefixLoad] = {}
        """Active loads by the blocks that they bring."""
        self._jobs: queue.SimpleQueue[PrefixLoad | None] = queue.SimpleQueue()
        self._num_threads = num_threads

    def start_threads(self) -> None:
        for number in range(self._num_threads):
            threading.Thread(target=self._run, name=f"load-{number}", daemon=True).start()

    @property
    def num_active(self) -> int:
        return len(self.active)

    def is_fetching(self, sequence: TokenSequence) -> bool:
        return sequence.fetch is not None and not sequence.fetch.ended

    def start(self, sequence: TokenSequence, num_cached_blocks: int) -> bool:
        if sequence.has_fetched:
            return False
        hashes = self._loadable_hashes(sequence)
        if num_cached_blocks >= len(hashes):
            return False
        other = self._loads.get(hashes[num_cached_blocks])
        if other is not None:  # it is loaded already, for another sequence or for none: look again when that has ended
            compute_s = self._prefill_rate.seconds((len(hashes) - num_cached_blocks) * self._allocator.block_size)
            other.deadline_s = min(other.deadline_s, time.monotonic() + max(_LAG_S, compute_s))
            sequence.fetch = other
            return True
        sources, seconds = self._choose(sequence, hashes, num_cached_blocks)
        if not sources:
            sequence.has_fetched = True
            return False
        if len(self.active) >= self._num_threads:  # each of them ends soon, by its deadline at the latest
            return True
        return self._begin(sequence, hashes, sources, seconds)

    def count_fetchable(self, sequence: TokenSequence, num_cached_blocks: int) -> int:
        sources, _ = self._choose(sequence, self._loadable_hashes(sequence), num_cached_blocks)
        return sources[-1].stop - num_cached_blocks if sources else 0

    def give_up_latest(self) -> bool:
        if not self.active:
            return False
        self._end(self.active[-1])
        return True

    def give_up_all(self) -> None:
        while self.give_up_latest():
            pass

    def load_chain(
        self, root: BlockHash, hashes: Sequence[BlockHash], source: LoadSource, deadline_s: float
    ) -> PrefixLoad | None:
        """Load a chain for no sequence, from one source. None: it is here, or there is no thread or room for it."""
        is_busy = len(self.active) > self._num_threads // 2 or any(each in self._loads for each in hashes)
        if is_busy or source.start >= source.stop:
            return None
        return self._reserve(root, hashes, [source], deadline_s)

    def poll(self, now_s: float) -> None:
        """Make findable what has arrived. End the loads that are complete or late."""
        for load in self.active.copy():
            if load.num_arrived > load.allocation.num_filled:
                load.allocation.fill(load.num_arrived)
            late = next((source for source in load.sources if load.num_arrived < source.stop), None)
            if load.finished or late is None:
                self._end(load)
            elif now_s >= load.deadline_s:
                self._end(load)
                late.rate.add(0, now_s - load.started_s, now_s)

    def stop(self) -> None:
        self.give_up_all()
        for _ in range(self._num_threads):
            self._jobs.put(None)

    # --- on the engine thread -----------------------------------------------------------------------------------

    def _loadable_hashes(self, sequence: TokenSequence) -> list[BlockHash]:
        size = self._allocator.block_size
        return sequence.hash_blocks(size)[: (len(sequence.token_ids) - 1) // size]

    def _choose(
        self, sequence: TokenSequence, hashes: Sequence[BlockHash], num_cached: int
    ) -> tuple[list[LoadSource], float]:
        """Return the sources to load from, and the seconds that this takes: none where computing is faster."""
        if not sequence.reuse:
            return [], 0.0
        size = self._allocator.block_size
        best: tuple[float, int, float] = (0.0, 0, 0.0)
        gain_s, load_s = 0.0, 0.0
        sources = self._sources(sequence, hashes, num_cached)
        for number, source in enumerate(sources, 1):
            num_tokens = (source.stop - source.start) * size
            seconds = source.rate.seconds(num_tokens, time.monotonic())
            load_s += seconds
            gain_s += self._prefill_rate.seconds(num_tokens) - seconds
            if gain_s > best[0]:
                best = (gain_s, number, load_s)
        return sources[: best[1]], best[2]

    def _begin(
        self, sequence: TokenSequence, hashes: Sequence[BlockHash], sources: Sequence[LoadSource], seconds: float
    ) -> bool:
        sequence.has_fetched = True
        first, stop = sources[0].start, sources[-1].stop
        compute_s = self._prefill_rate.seconds((stop - first) * self._allocator.block_size)
        timeout_s = max(_LAG_S, min(compute_s, _LAG_FACTOR * seconds + _LAG_S))
        sequence.fetch = self._reserve(sequence.root, hashes[:stop], sources, time.monotonic() + timeout_s)
        return sequence.fetch is not None

    def _reserve(
        self, root: BlockHash, hashes: Sequence[BlockHash], sources: Sequence[LoadSource], deadline_s: float
    ) -> PrefixLoad | None:
        allocation = self._allocator.reserve(root, hashes)
        if allocation is None:
            return None
        links = [ChainLink(each, hashes[n - 1] if n else root, n) for n, each in enumerate(hashes)]
        load = PrefixLoad(links, sources, allocation, time.monotonic(), deadline_s, num_arrived=allocation.num_filled)
        self.active.append(load)
        self._loads.update(dict.fromkeys(hashes[sources[0].start :], load))
        self._jobs.put(load)
        return load

    def _end(self, load: PrefixLoad) -> None:
        with load.lock:  # the thread holds it while it fills one block
            load.ended = True
            if load.waits_at is not None:
                load.waits_at.interrupt()
        if load.num_arrived > load.allocation.num_filled:
            load.allocation.fill(load.num_arrived)
        load.allocation.free()
        self.active.remove(load)
        for link in load.links[load.sources[0].start :]:
            if self._loads.get(link.block_hash) is load:
                del self._loads[link.block_hash]
        self._ended(load)

    # --- on a load thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        payload: memoryview | None = None
        while (load := self._jobs.get()) is not None:
            try:
                payload = payload or self._pool.new_payload()
                for _ in self.read_blocks(load, payload):
                    pass
            except Exception as error:
                if not load.ended:
                    logger.warning("a load was cut short: %s", error or type(error).__name__)
            load.finished = True
            self.wake()

    def read_blocks(self, load: PrefixLoad, payload: memoryview) -> Iterator[None]:
        """Read blocks into the pool, one a turn, up to the first miss or the end of the load. May raise anything."""
        for source in load.sources:
            links = load.links[source.start : source.stop]
            begun_s, num_read = time.monotonic(), 0
            try:
                with source.open(links) as reader:
                    with load.lock:
                        load.waits_at = reader if isinstance(reader, Interruptible) else None
                    for link in links:
                        if load.ended or not reader.read(link, payload) or not self._fill(load, link, payload):
                            return
                        num_read += 1
                        yield
            finally:
                if num_read:  # a miss says nothing of the rate
                    now_s = time.monotonic()
                    source.rate.add(num_read * self._allocator.block_size, now_s - begun_s, now_s)

    def _fill(self, load: PrefixLoad, link: ChainLink, payload: memoryview) -> bool:
        """Write a block into the pool. False: the load has ended, and its blocks are no longer its own."""
        with load.lock:
            if not load.ended:
                self._pool.write(load.allocation.block_table[link.depth], payload)
                load.num_arrived = link.depth + 1
            return not load.ended
