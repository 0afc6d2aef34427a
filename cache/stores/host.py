"""Blocks in host memory, below the pool of a device."""

from __future__ import annotations

from collections.abc import Sequence

from cache.stores.base import BlockStore
from cache.types import ChainLink


class HostStore(BlockStore):
    """A `BlockStore` in the caller's memory, which is pinned for copies to and from the device."""

    tier = "host"
    takes = "victims"
    guess_bytes_per_s = 12e9  # by PCIe 4; a GPU of PCIe 5 read 18 GB/s

    def __init__(self, slabs: Sequence[memoryview], payload_bytes: int) -> None:
        """Cut writable slabs into records; the rest of each slab stays unused. Raises ValueError."""
        super().__init__(payload_bytes)
        if any(slab.readonly for slab in slabs):
            raise ValueError("a slab of host memory must be writable")
        flat = [slab.cast("B") for slab in slabs]
        self._records = [
            slab[start : start + payload_bytes]
            for slab in flat
            for start in range(0, slab.nbytes - payload_bytes + 1, payload_bytes)
        ]
        if not self._records:
            sizes = sum(slab.nbytes for slab in flat)
            raise ValueError(f"{sizes:,} bytes of host memory hold no block of {payload_bytes:,} bytes")
        self._reset_records()

    def _room(self, payload: memoryview, record: int) -> memoryview:
        return self._records[record]

    def _read_record(self, payload: memoryview, link: ChainLink, record: int) -> bool:
        return True

    def _write_record(self, payload: memoryview, link: ChainLink, record: int) -> bool:
        return True

    def _grow(self) -> None:
        """Do nothing: all records exist from the start."""

    def _reset_records(self) -> None:
        self._free = [record for record in reversed(range(len(self._records))) if record not in self._writing]
