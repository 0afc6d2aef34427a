"""The contract of a store of blocks below the pool: host memory, or disk.

A store is a hint, like the index: any doubt about a block is a miss. The pool is not a store: its blocks are read in
place (see `cache.allocators`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from cache.events import BlockEvent
from cache.types import BlockHash, Tier


@dataclass(frozen=True, slots=True)
class ChainLink:
    """A full block and its place in its chain."""

    block_hash: BlockHash
    parent: BlockHash
    """The root, at depth 0."""
    depth: int
    """Blocks before it."""


class BlockStore(Protocol):
    """Blocks by their hashes; the set is prefix-closed. Any thread may call it; only `read` and `write` do I/O.

    A store belongs to one worker: `clear` deletes everything in it. A block is the KV of all layers, in the layout of
    `worker.attention.kv_cache`.
    """

    tier: Tier
    takes: Literal["all", "victims"]
    """Which blocks the worker saves here: every full block of the pool, or only those about to be evicted."""
    guess_bytes_per_s: float
    """The assumed rate of reads until one is measured."""
    version: int
    """Changes with every `clear`."""

    def __len__(self) -> int:
        """Return the number of blocks held."""

    def __contains__(self, block_hash: BlockHash) -> bool: ...

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """Return the number of leading `hashes` that are held. They are a chain, or the end of one."""

    def read(self, link: ChainLink, payload: memoryview) -> bool:
        """Fill `payload` with the block. False: a miss, and `payload` is undefined; a damaged block is dropped."""

    def write(self, link: ChainLink, payload: memoryview, version: int) -> bool:
        """Keep the block, and evict others for it. False: not kept.

        The store is full, the parent is missing, the device fails, or `clear` was called since `version` was read.
        """

    def clear(self) -> None:
        """Delete every block, even one that is being written. Emits no events: the worker begins a new epoch."""

    def close(self) -> None:
        """Release the store. Blocks on disk remain."""

    def cached_hashes(self) -> Iterator[BlockHash]:
        """Return every hash held, parents before children; for tests."""

    def take_events(self) -> list[BlockEvent]:
        """Return the events since the last call, in order. The blocks found at the start are Stored."""
