"""Block events. Replayed since a pool's last reset, they yield exactly the set of hashes that it holds.

Stored comes with the first copy of a hash and Removed with the last: a set has no copies. Within one batch parents are
stored before children and removed after them. So the set is prefix-closed after every batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from cache.types import BlockHash


@dataclass(frozen=True, slots=True)
class Stored:
    """The first copy of `block_hash` became findable, after the forward that wrote it had returned."""

    block_hash: BlockHash


@dataclass(frozen=True, slots=True)
class Removed:
    """The last copy of `block_hash` was evicted."""

    block_hash: BlockHash


@dataclass(frozen=True, slots=True)
class Stops:
    """A hit that matches a prompt up to `block_hash`, and no further, stops after `num_blocks` blocks.

    Only pools send it in which a hit may stop before the end of a match. A stored block starts with 0.
    """

    block_hash: BlockHash
    num_blocks: int


BlockEvent = Stored | Removed | Stops
