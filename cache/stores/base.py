"""The base of the stores of blocks below the pool: records of one size, indexed by a `ChainLRU`.

A store is a hint, like the index: any doubt about a block is a miss. The pool is not a store: its blocks are read in
place (see `cache.allocators`).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal

from cache.events import BlockEvent
from cache.stores.chain_lru import ChainLRU
from cache.types import BlockHash, ChainLink, Tier


class BlockStore(ABC):
    """Blocks by their hashes, in numbered records, which a subclass reads and writes; the set is prefix-closed.

    Any thread may call it; only `read` and `write` do I/O. A store belongs to one worker: `clear` deletes everything in
    it. A block is the KV of all layers, in the layout of `worker.attention.kv_cache`.

    The lock guards the index. It is never held while a record is read or written, so a record may be overwritten during
    a read. Its block is then no longer held: `read` checks that afterwards.

    The records of a store in memory are copied in place. A second copy of megabytes takes longer than a GPU's bus, and
    holds the interpreter's lock.
    """

    tier: Tier
    takes: Literal["all", "victims"]
    """Which blocks the worker saves here: every full block of the pool, or only those about to be evicted."""
    guess_bytes_per_s: float
    """The assumed rate of reads until one is measured."""

    def __init__(self, payload_bytes: int) -> None:
        self._payload_bytes = payload_bytes
        self._lock = threading.Lock()
        self._chains = ChainLRU()
        self._free: list[int] = []
        """Numbers of the records without a block or a write in progress; the last is taken first."""
        self._writing: set[int] = set()
        self.version = 0
        """Changes with every `clear`."""
        self._closed = False

    # The engine thread calls these for every request. They take no lock: operations on a dict are atomic.

    def __len__(self) -> int:
        """Return the number of blocks held."""
        return len(self._chains)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._chains

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """Return the number of leading `hashes` that are held. They are a chain, or the end of one."""
        return self._chains.match(hashes)

    def read(self, link: ChainLink, payload: memoryview, use: Callable[[memoryview], object] | None = None) -> bool:
        """Fill `payload` with the block, or give it to `use`, which copies it. False: a miss.

        The copy of a miss is undefined. A damaged block is dropped.
        """
        assert payload.nbytes == self._payload_bytes, f"a block of {payload.nbytes} bytes, not {self._payload_bytes}"
        with self._lock:
            block = self._chains.get(link.block_hash)
        if block is None or block.link != link:
            return False
        room = self._room(payload, block.record)
        is_exact = self._read_record(room, link, block.record)
        if is_exact and use is not None:
            use(room)
        elif is_exact and room is not payload:
            payload[:] = room
        with self._lock:
            if self._chains.get(link.block_hash) is not block:
                return False
            if is_exact:
                self._chains.touch(block)
            else:
                self._free += self._chains.forget(lambda held: held is block)
        return is_exact

    def write(
        self, link: ChainLink, payload: memoryview, version: int, fill: Callable[[memoryview], bool] | None = None
    ) -> bool:
        """Store the block of `payload`, or the one that `fill` copies, and evict others for it. False: not stored.

        The store is full, the parent is missing, the device or `fill` fails, or `clear` came after `version`.
        """
        assert payload.nbytes == self._payload_bytes, f"a block of {payload.nbytes} bytes, not {self._payload_bytes}"
        with self._lock:
            if self._closed or version != self.version:
                return False
            if (held := self._chains.get(link.block_hash)) is not None:
                self._chains.touch(held)
                return True
            record = self._take_record(link)
            if record is None:
                return False
            self._writing.add(record)
        room, is_written = self._room(payload, record), False
        try:
            if fill is None and room is not payload:
                room[:] = payload
            is_written = (fill is None or fill(room)) and self._write_record(room, link, record)
        finally:  # `fill` may raise anything: a device's error must not take the record
            with self._lock:
                self._writing.discard(record)
                # The lock was released: the parent may be gone, or another thread may have written this block.
                if is_written and version == self.version and self._chains.accepts(link):
                    self._chains.add(link, record)
                else:
                    self._free += self._usable([record])
                is_held = version == self.version and link.block_hash in self._chains
        return is_held

    def clear(self) -> None:
        """Delete every block, even one that is being written. Emits no events: the worker begins a new epoch."""
        with self._lock:
            self._forget_all()

    def close(self) -> None:
        """Release the store. Blocks on disk remain."""
        with self._lock:
            self._closed = True
            self._forget_all()

    def take_events(self) -> list[BlockEvent]:
        """Return the events since the last call, in order. The blocks found at the start are Stored."""
        with self._lock:
            return self._chains.take_events()

    def _forget_all(self) -> None:
        """Begin a new version without blocks. The lock is held."""
        self.version += 1
        self._chains = ChainLRU()
        self._reset_records()

    def _take_record(self, link: ChainLink) -> int | None:
        if not self._chains.accepts(link):
            return None
        if not self._free:
            self._grow()
        return self._free.pop() if self._free else self._chains.evict(keep=link.parent)

    def _room(self, payload: memoryview, record: int) -> memoryview:
        """Return what the record's block is copied to and from: `payload`, or the record itself."""
        return payload

    @abstractmethod
    def _read_record(self, payload: memoryview, link: ChainLink, record: int) -> bool:
        """Read a record. False: it does not hold this block, or is damaged."""

    @abstractmethod
    def _write_record(self, payload: memoryview, link: ChainLink, record: int) -> bool:
        """Write a record."""

    @abstractmethod
    def _grow(self) -> None:
        """Add records to `_free`, if there may be more. The lock is held."""

    def _usable(self, records: Sequence[int]) -> Sequence[int]:
        """Return the records that still exist. The lock is held."""
        return records

    @abstractmethod
    def _reset_records(self) -> None:
        """Free all records except those that are being written. The lock is held."""
