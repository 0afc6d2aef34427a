"""The block transfers of one engine: savers, fetches, and the records that peers ask for."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from http.client import HTTPException
from typing import Final, TypeVar

import msgspec

from cache.block_record import RecordFormat
from cache.events import BlockEvent, Stored
from cache.records import WorkerLoad, WorkerMember
from cache.stores.base import BlockStore
from cache.types import BlockHash, ChainLink
from worker.contracts.exchange import ChainsWanted, Handover, OfferedChain
from worker.contracts.mailbox import Mailbox
from worker.contracts.metrics import WorkerMetrics
from worker.contracts.rates import PrefillRate, TransferRate
from worker.kv_transfer.fetches import FetchQueue, FetchSource, PrefixFetch
from worker.kv_transfer.peers import FetchError, PeerClient
from worker.kv_transfer.pool_blocks import PoolBlocks
from worker.kv_transfer.saver import BlockSaver
from worker.publishing.inbox import PublisherInbox
from worker.scheduler.request import TokenSequence

logger = logging.getLogger(__name__)

T = TypeVar("T")
_PEER_BYTES_PER_S: Final = 400e6
"""The rate from a peer, until a fetch is measured."""
_NUM_VICTIMS: Final = 64
"""Blocks next to be evicted that are offered to the stores which take victims."""
FLUSH_S: Final = 5.0
"""Time to save what is queued, when the process ends."""
_ADOPT_S: Final = 10.0
"""Time for a chain that a peer hands over."""
PEER: Final = "peer"


@dataclass(eq=False)
class KVTransfers:
    """A `worker.contracts.exchange.BlockExchange`. Owned by the engine. Any thread may call `read_record` and `close`.

    Its coroutines run on the event loop, its other public methods on the engine thread.
    """

    _pool: PoolBlocks
    prefill_rate: InitVar[PrefillRate]
    _stores: Sequence[BlockStore]
    """Those below the pool, the fastest first."""
    record: RecordFormat
    _peers: PeerClient | None
    """Without it, no block comes from other workers."""
    _metrics: WorkerMetrics
    _publisher: PublisherInbox | None = None
    """Receives the events of the stores."""
    mailbox: Mailbox = field(default_factory=Mailbox, init=False)
    """Runs commands on the engine thread, for the engine too."""
    _adoptions: dict[PrefixFetch, Future[int]] = field(default_factory=dict, init=False)
    _reporting: threading.Lock = field(default_factory=threading.Lock, init=False)
    """Keeps the events of a store in order: several threads report them."""

    def __post_init__(self, prefill_rate: PrefillRate) -> None:
        pool, allocator, stores = self._pool, self._pool.allocator, self._stores
        self.layout = "" if self._peers is None else self.record.fingerprint
        """The fingerprint of its records; empty: no peers are configured."""
        self.num_blocks = allocator.num_blocks
        self.new_payload = pool.new_payload
        self._allocator = allocator
        block_bytes, block_size = pool.num_bytes, allocator.block_size
        guesses = {store.tier: store.guess_bytes_per_s for store in stores} | {PEER: _PEER_BYTES_PER_S}
        self._rates = {place: TransferRate(guess * block_size / block_bytes) for place, guess in guesses.items()}
        self.savers = {store.tier: BlockSaver(store, pool, self._saved) for store in stores}
        wake = partial(self.mailbox.put, lambda: None)
        self.fetches = FetchQueue(allocator, pool, prefill_rate, self._sources, self._fetched, wake)

    def start(self) -> None:
        """Start the threads, and report what the stores hold from the start."""
        self.fetches.start_threads()
        for saver in self.savers.values():
            saver.start_thread()
        for store in self._stores:
            self._report(store)

    def take(self, events: Sequence[BlockEvent]) -> None:
        """Offer each store the blocks that it takes: those stored by these events, or the next victims."""
        for store in self._stores:
            if store.takes == "victims":
                self.savers[store.tier].offer(self._allocator.next_victims(_NUM_VICTIMS))
            elif events:
                self.savers[store.tier].offer([event.block_hash for event in events if type(event) is Stored])

    def with_rates(self, load: WorkerLoad) -> WorkerLoad:
        """Return the load with the measured rates of fetches."""
        now_s = time.monotonic()
        return msgspec.structs.replace(
            load,
            tier_tokens_per_s=tuple([self._rates[store.tier].tokens_per_s(now_s) for store in self._stores]),
            fetch_tokens_per_s=0.0 if self._peers is None else self._rates[PEER].tokens_per_s(now_s),
        )

    def described(self, member: WorkerMember) -> WorkerMember:
        """Return the member with the fields about its transfers."""
        return replace(member, layout=self.layout, tiers=tuple(store.tier for store in self._stores))

    def purge(self) -> None:
        """Delete every block below the pool. The pool is empty, so no saver finds a block to save."""
        with self._reporting:  # no thread reports older events after this
            for store in self._stores:
                self.savers[store.tier].queue.clear()
                store.clear()
                self._metrics.stored_blocks.labels(store.tier).set(len(store))

    def close(self) -> None:
        """Save the queued blocks within `FLUSH_S`, and release the stores. Any thread."""
        deadline_s = time.monotonic() + FLUSH_S
        for saver in self.savers.values():
            saver.flush(max(0.0, deadline_s - time.monotonic()))
            saver.stop()
        self.fetches.stop()
        for store in self._stores:
            store.close()

    def read_record(self, link: ChainLink, payload: memoryview) -> bytes | None:
        """Read a block for a peer, from wherever this worker has it, and return the record's header. None: a miss."""
        is_known = self._allocator.link(link.block_hash) == link
        if not is_known or not self._pool.read(link.block_hash, payload):
            holder = next((store for store in self._stores if link.block_hash in store), None)
            if holder is None:
                return None
            if not holder.read(link, payload):
                self._report(holder)  # a damaged record is dropped
                return None
        return self.record.header(link, payload)

    async def adopt(self, url: str, epoch: str, chain: OfferedChain) -> int:
        assert self._peers is not None, "no peers are configured"
        root, hashes = BlockHash(chain.root), chain.block_hashes()
        open_peer = partial(self._peers.fetching, url, epoch, background=True)
        adopted: Future[int] = Future()
        adopted.set_running_or_notify_cancel()  # a caller that stops waiting must not cancel it

        def begin() -> None:
            first = len(self._allocator.find_blocks(hashes))
            source = FetchSource(PEER, first, len(hashes), self._rates[PEER], open_peer)
            fetch = self.fetches.fetch_chain(root, hashes, source, time.monotonic() + _ADOPT_S)
            if fetch is None:
                adopted.set_result(0)
            else:
                self._adoptions[fetch] = adopted

        self.mailbox.put(begin, adopted.set_exception)
        return await asyncio.wrap_future(adopted)

    async def ask(
        self, url: str, epoch: str, message: ChainsWanted | Handover, answer: type[T], timeout_s: float
    ) -> T | None:
        assert self._peers is not None, "no peers are configured"
        try:
            return await asyncio.to_thread(self._peers.ask, url, epoch, message, answer, timeout_s)
        except (OSError, HTTPException, FetchError, ValueError) as error:
            logger.warning("%s exchanges no blocks: %s", url, error)
            return None

    async def latest_chains(self, max_blocks: int) -> list[OfferedChain]:
        chains = self.mailbox.call(lambda: self._allocator.recent_chains(max_blocks))
        return [OfferedChain.of(chain) for chain in await asyncio.wrap_future(chains)]

    def _sources(self, sequence: TokenSequence, hashes: Sequence[BlockHash], num_cached: int) -> list[FetchSource]:
        """List the places from which the blocks after the first `num_cached` can come."""
        found, at = [], num_cached
        for store in self._stores:
            if count := store.match(hashes[at:]):
                open_store = partial(lambda store, links: nullcontext(store), store)
                found.append(FetchSource(store.tier, at, at + count, self._rates[store.tier], open_store))
                at += count
        source = sequence.request.wire.source
        if self._peers is not None and source is not None and at < (stop := min(source.num_blocks, len(hashes))):
            open_peer = partial(self._peers.fetching, source.url, source.epoch)
            found.append(FetchSource(PEER, at, stop, self._rates[PEER], open_peer))
        return found

    def _saved(self, store: BlockStore, num_blocks: int) -> None:
        self._metrics.saved_bytes.labels(store.tier).inc(num_blocks * self._pool.num_bytes)
        self._report(store)

    def _fetched(self, fetch: PrefixFetch) -> None:
        end = "complete" if fetch.num_arrived == len(fetch.links) else "short" if fetch.finished else "late"
        blocks = fetch.num_fetched_blocks(fetch.num_arrived)
        self._metrics.count_fetch(end, blocks, self._allocator.block_size, self._pool.num_bytes)
        if (adopted := self._adoptions.pop(fetch, None)) is not None:
            # Resolve in the next turn, after this one has reported the blocks, so that a joining worker publishes them.
            self.mailbox.put(partial(adopted.set_result, sum(blocks.values())), adopted.set_exception)
        for store in self._stores:  # a damaged record is dropped
            self._report(store)

    def _report(self, store: BlockStore) -> None:
        with self._reporting:
            events = store.take_events()
            self._metrics.stored_blocks.labels(store.tier).set(len(store))
            if events and self._publisher is not None:
                self._publisher.offer_tier(store.tier, events)
