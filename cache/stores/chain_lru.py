"""The blocks of a store: the record of each, and the order of eviction."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cache.events import BlockEvent, Removed, Stored
from cache.types import BlockHash, ChainLink


@dataclass(slots=True, eq=False)
class HeldBlock:
    """A block and the number of its record. `is_queued`: the heap of leaves has an item for it."""

    link: ChainLink
    record: int
    last_use: int = 0
    num_children: int = 0
    is_queued: bool = False


class ChainLRU:
    """A prefix-closed set of blocks, with its events. The least recently used leaf is evicted first.

    A chain is used head first, so it is also evicted as a whole: after a leaf come its parents, unless another chain
    has used them since. Not thread-safe; every operation but `forget` takes O(log n) at most.
    """

    __slots__ = ("_blocks", "_clock", "_events", "_leaves")

    def __init__(self) -> None:
        self._blocks: dict[BlockHash, HeldBlock] = {}
        """In the order of arrival, so parents come before children."""
        self._leaves: list[tuple[int, HeldBlock]] = []
        """A heap of (last use, block) with every leaf. Items may be stale: `evict` checks them."""
        self._clock = 0
        self._events: list[BlockEvent] = []

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._blocks

    def get(self, block_hash: BlockHash) -> HeldBlock | None:
        return self._blocks.get(block_hash)

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """Return the number of leading `hashes` that are held."""
        blocks = self._blocks
        return next((count for count, block_hash in enumerate(hashes) if block_hash not in blocks), len(hashes))

    def accepts(self, link: ChainLink) -> bool:
        """Return whether the block is not held, and its parent is."""
        if link.block_hash in self._blocks:
            return False
        parent = self._blocks.get(link.parent)
        return link.depth == 0 or (parent is not None and parent.link.depth == link.depth - 1)

    def add(self, link: ChainLink, record: int) -> None:
        """Hold a block that `accepts` accepts."""
        assert self.accepts(link), f"the parent of block {link.depth} of a chain is not held, or the block is"
        if link.depth:
            self._blocks[link.parent].num_children += 1
        block = self._blocks[link.block_hash] = HeldBlock(link, record)
        self.touch(block)
        self._queue(block)
        self._events.append(Stored(link.block_hash))

    def touch(self, block: HeldBlock) -> None:
        """Make the block the most recently used."""
        self._clock += 1
        block.last_use = self._clock

    def evict(self, keep: BlockHash) -> int | None:
        """Drop the least recently used leaf except `keep`, and return its record. None: no other leaf is held."""
        kept = None
        record = None
        while self._leaves and record is None:
            last_use, block = heapq.heappop(self._leaves)
            block.is_queued = False
            if block.num_children:
                continue
            if block.link.block_hash == keep:
                kept = block
            elif last_use != block.last_use:
                self._queue(block)
            else:
                self._remove(block)
                record = block.record
        if kept is not None:
            self._queue(kept)
        return record

    def forget(self, is_lost: Callable[[HeldBlock], bool]) -> list[int]:
        """Drop the lost blocks and all blocks after them; return their records. Takes O(n)."""
        dropped: dict[BlockHash, HeldBlock] = {}
        for block_hash, block in self._blocks.items():
            if is_lost(block) or (block.link.depth and block.link.parent in dropped):
                dropped[block_hash] = block
        for block in reversed(dropped.values()):
            self._remove(block)
        self._leaves = [item for item in self._leaves if item[1].link.block_hash not in dropped]
        heapq.heapify(self._leaves)
        return [block.record for block in dropped.values()]

    def take_events(self) -> list[BlockEvent]:
        events, self._events = self._events, []
        return events

    def _remove(self, block: HeldBlock) -> None:
        """Drop a leaf."""
        assert block.num_children == 0, "a block after this one is held"
        link = block.link
        del self._blocks[link.block_hash]
        self._events.append(Removed(link.block_hash))
        if link.depth:
            parent = self._blocks[link.parent]
            parent.num_children -= 1
            if parent.num_children == 0:
                self._queue(parent)

    def _queue(self, block: HeldBlock) -> None:
        if not block.is_queued:
            block.is_queued = True
            heapq.heappush(self._leaves, (block.last_use, block))
