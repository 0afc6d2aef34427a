"""The blocks that an engine holds, under Headstart's hashes, and an event for each change."""

from __future__ import annotations

from collections.abc import Iterable

from cache.events import BlockEvent, Removed, Stops, Stored
from cache.types import BlockHash
from worker.adapter.block_names import Node


class BlockHolders:
    """Which nodes of the engine's blocks (`block_names.py`) hold each block of Headstart's. Owned by `EngineBlocks`.

    Mostly it is one. Several hold it if they have the same tokens under different names of the engine. A block is
    stored with its first holder and removed with its last.
    """

    def __init__(self) -> None:
        self._events: list[BlockEvent] = []
        self.published: dict[BlockHash, Node | set[Node]] = {}
        """The published blocks and their holders, in the order of storing, so parents come first."""
        self.stops: dict[BlockHash, int] = {}
        """For a match that ends with this block: the number of blocks of its hit, if not 0. Empty without ends."""
        self._new: set[BlockHash] | None = None
        """Blocks whose stop is not published yet; None for an engine without ends."""

    def of(self, block_hash: BlockHash) -> list[Node]:
        """Return the holders of a block."""
        found = self.published.get(block_hash, ())
        return [found] if isinstance(found, Node) else list(found)

    def add_holder(self, block_hash: BlockHash, node: Node) -> None:
        found = self.published.get(block_hash)
        if isinstance(found, set):
            found.add(node)
        elif found is not None:
            self.published[block_hash] = {found, node}
        else:
            self.published[block_hash] = node
            if self._new is not None:
                self._new.add(block_hash)
            self._events.append(Stored(block_hash))

    def remove_holder(self, block_hash: BlockHash, node: Node) -> None:
        found = self.published[block_hash]
        if isinstance(found, set) and len(found) > 1:
            found.remove(node)
            return
        del self.published[block_hash]
        self.stops.pop(block_hash, None)
        self._events.append(Removed(block_hash))

    def publish_stops(self, moved: Iterable[Node], block_size: int) -> None:
        """Add an event for each block whose stop has changed. `moved`: the nodes whose own stops have changed."""
        new = set(self.published) if self._new is None else self._new
        new.update(block_hash for node in moved if node.is_visible for block_hash in node.later_hashes())
        for block_hash in new:
            if block_hash in self.published:
                num_blocks = min(node.stop_at(block_hash, block_size) for node in self.of(block_hash)) // block_size
                if num_blocks != self.stops.get(block_hash, 0):
                    self._events.append(Stops(block_hash, num_blocks))
                self.stops[block_hash] = num_blocks
                if not num_blocks:
                    del self.stops[block_hash]
        self._new = set()

    def remove_all(self) -> None:
        """Remove every holder, with events."""
        self._events += [Removed(block_hash) for block_hash in reversed(self.published)]
        self._forget()

    def clear(self) -> None:
        """Remove every holder, and drop all events."""
        self._events = []
        self._forget()

    def take_events(self) -> list[BlockEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def _forget(self) -> None:
        self.published = {}
        self.stops = {}
        self._new = None if self._new is None else set()
