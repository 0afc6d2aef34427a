"""The set of hashes that a pool's events describe."""

from __future__ import annotations

from collections.abc import Iterable

from cache.events import BlockEvent, Removed, Stored
from cache.types import BlockHash


def replay(events: Iterable[BlockEvent], held: set[BlockHash] | None = None) -> set[BlockHash]:
    """Apply `events` to `held` (a new empty set by default) and return it."""
    held = set() if held is None else held
    for event in events:
        match event:
            case Stored(block_hash):
                held.add(block_hash)
            case Removed(block_hash):
                held.discard(block_hash)
    return held
