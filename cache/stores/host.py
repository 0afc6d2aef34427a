"""Blocks in host memory, below the pool of a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from cache.store import ChainLink
from cache.stores.slot_store import SlotStore
from cache.types import Tier


class HostStore(SlotStore):
    """A `BlockStore` in memory of the caller's, which pins it for a device to copy from."""

    tier: Tier = "host"
    takes: Literal["all", "victims"] = "victims"
    guess_bytes_per_s = 4e9

    def __init__(self, slabs: Sequence[memoryview], payload_bytes: int) -> None:
        """Cut writable slabs into slots; what is left of each stays unused. Raises ValueError."""
        super().__init__(payload_bytes)
        if any(slab.readonly for slab in slabs):
            raise ValueError("a slab of host memory must be writable")
        flat = [slab.cast("B") for slab in slabs]
        self._slots = [
            slab[start : start + payload_bytes]
            for slab in flat
            for start in range(0, slab.nbytes - payload_bytes + 1, payload_bytes)
        ]
        if not self._slots:
            sizes = sum(slab.nbytes for slab in flat)
            raise ValueError(f"{sizes:,} bytes of host memory hold no block of {payload_bytes:,} bytes")
        self._reset_slots()

    def _fill(self, payload: memoryview, link: ChainLink, slot: int) -> bool:
        payload[:] = self._slots[slot]
        return True

    def _keep(self, payload: memoryview, link: ChainLink, slot: int) -> bool:
        self._slots[slot][:] = payload
        return True

    def _grow(self) -> None:
        """Do nothing: all slots exist from the start."""

    def _usable(self, slots: Sequence[int]) -> Sequence[int]:
        return slots

    def _reset_slots(self) -> None:
        self._free = [slot for slot in reversed(range(len(self._slots))) if slot not in self._writing]
