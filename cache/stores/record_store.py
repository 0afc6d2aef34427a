"""The common part of the stores: records of one size, indexed by a `ChainLRU`."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence

from cache.events import BlockEvent
from cache.store import BlockStore, ChainLink
from cache.stores.chain_lru import ChainLRU
from cache.types import BlockHash


class RecordStore(BlockStore):
    """Numbered records; a subclass reads and writes them.

    The lock guards the index. It is never held while a record is read or written, so a record may be overwritten during
    a read. Its block is then no longer held: `read` checks that afterwards.
    """

    def __init__(self, payload_bytes: int) -> None:
        self._payload_bytes = payload_bytes
        self._lock = threading.Lock()
        self._chains = ChainLRU()
        self._free: list[int] = []
        """Numbers of the records without a block or a write in progress; the last is taken first."""
        self._writing: set[int] = set()
        self.version = 0
        self._closed = False

    # The engine thread calls these for every request. They take no lock: operations on a dict are atomic.

    def __len__(self) -> int:
        return len(self._chains)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._chains

    def match(self, hashes: Sequence[BlockHash]) -> int:
        return self._chains.match(hashes)

    def read(self, link: ChainLink, payload: memoryview) -> bool:
        assert payload.nbytes == self._payload_bytes, f"a block of {payload.nbytes} bytes, not {self._payload_bytes}"
        with self._lock:
            block = self._chains.get(link.block_hash)
        if block is None or block.link != link:
            return False
        is_exact = self._fill(payload, link, block.record)
        with self._lock:
            if self._chains.get(link.block_hash) is not block:
                return False
            if is_exact:
                self._chains.touch(block)
            else:
                self._free += self._chains.forget(lambda held: held is block)
        return is_exact

    def write(self, link: ChainLink, payload: memoryview, version: int) -> bool:
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
        is_written = self._keep(payload, link, record)
        with self._lock:
            self._writing.discard(record)
            # The lock was open: the parent may be gone, or another thread may have written this block.
            if is_written and version == self.version and self._chains.accepts(link):
                self._chains.add(link, record)
            else:
                self._free += self._usable([record])
            return version == self.version and link.block_hash in self._chains

    def clear(self) -> None:
        with self._lock:
            self._forget_all()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._forget_all()

    def cached_hashes(self) -> Iterator[BlockHash]:
        with self._lock:
            return iter(list(self._chains))

    def take_events(self) -> list[BlockEvent]:
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

    @abstractmethod
    def _fill(self, payload: memoryview, link: ChainLink, record: int) -> bool:
        """Read a record. False: it does not hold this block, or is damaged."""

    @abstractmethod
    def _keep(self, payload: memoryview, link: ChainLink, record: int) -> bool:
        """Write a record."""

    @abstractmethod
    def _grow(self) -> None:
        """Add records to `_free`, if there may be more. The lock is held."""

    @abstractmethod
    def _usable(self, records: Sequence[int]) -> Sequence[int]:
        """Return the records that still exist. The lock is held."""

    @abstractmethod
    def _reset_records(self) -> None:
        """Free all records except those that are being written. The lock is held."""
