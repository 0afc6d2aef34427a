"""The contract of a store of blocks below the pool: host memory, or disk.

A store is a hint, as the index is: any doubt about a block is a miss. The pool is no store: its blocks are read in
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
    """Blocks by their hashes. What it holds is prefix-closed. Any thread may call it; only `read` and `write` do I/O.

    A block is `num_bytes` of the KV of all layers, as `worker.attention.kv_cache` lays it out.
    """

    tier: Tier
    takes: Literal["all", "victims"]
    """Which blocks of the pool the worker saves here: each when it is full, or only those next to be evicted."""
    guess_bytes_per_s: float
    """The rate of reads, until one is measured."""

    def __len__(self) -> int:
        """Return the number of blocks held."""

    def __contains__(self, block_hash: BlockHash) -> bool: ...

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many of `hashes`, a chain or the rest of one, are held from the first on."""

    def read(self, link: ChainLink, payload: memoryview) -> bool:
        """Fill `payload` with the block. False: a miss, and `payload` is undefined; a damaged block is dropped."""

    def write(self, link: ChainLink, payload: memoryview, version: int) -> bool:
        """Keep the block, and evict others for it. False: not kept.

        There is no room, its parent is not here, the device fails, or `clear` was called after `version` was read.
        """

    @property
    def version(self) -> int:
        """Changes with every `clear`."""

    def clear(self) -> None:
        """Drop and delete every block, also one that is being written. Emits no events: a new epoch begins."""

    def close(self) -> None:
        """Release the store. Blocks on disk stay there."""

    def cached_hashes(self) -> Iterator[BlockHash]:
        """Return every hash held, parents before children."""

    def take_events(self) -> list[BlockEvent]:
        """Return the events since the last call, in order. The blocks found at the start are Stored."""
