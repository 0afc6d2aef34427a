"""What a pool tells about itself. Replayed in order, the events give exactly the set of hashes it holds.

Stored comes on the first copy of a hash and Removed on the last: a set has no copies. Within one batch a parent is
stored before its child and a child removed before its parent, so that the set is prefix-closed after every batch.
"""

from __future__ import annotations

from collections.abc import Iterable
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
class Cleared:
    """The whole pool was reset: nothing stored before this event exists. The worker begins a new epoch."""


BlockEvent = Stored | Removed | Cleared


def replay(events: Iterable[BlockEvent], held: set[BlockHash] | None = None) -> set[BlockHash]:
    """Apply `events` to `held` (a new empty set by default) and return it."""
    held = set() if held is None else held
    for event in events:
        match event:
            case Stored(block_hash):
                held.add(block_hash)
            case Removed(block_hash):
                held.discard(block_hash)
            case Cleared():
                held.clear()
    return held
