"""Which of our blocks an engine holds, and the events of every change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cache.events import BlockEvent, Removed, Stops, Stored
from cache.types import BlockHash
from worker.adapter.block_names import Node
from worker.adapter.claims import UNSALTED_ROOT, RequestClaims


class BlockHolders:
    """The visible nodes that hold each of our blocks, mostly one. Owned by `EngineBlocks`.

    A block is stored with its first holder and removed with its last.
    """

    def __init__(self, claims: RequestClaims | None) -> None:
        """`claims` assign the blocks of an engine whose events carry no salt."""
        self._claims = claims
        self._events: list[BlockEvent] = []
        self._holders: dict[BlockHash, Node | set[Node]] = {}
        """In the order of storing, so parents come first."""
        self.stops: dict[BlockHash, int] = {}
        """After how many blocks a hit stops that matches up to a block, if not 0; empty for an engine without ends."""
        self._new: set[BlockHash] | None = None
        """Blocks whose stop is not published yet; None for an engine without ends."""

    @property
    def published(self) -> dict[BlockHash, Any]:
        """The published blocks, parents first."""
        return self._holders if self._claims is None else self._claims.published

    def of(self, block_hash: BlockHash) -> list[Node]:
        """Return the holders of a block."""
        found = self._holders.get(block_hash, ())
        return [found] if isinstance(found, Node) else list(found)

    def add_holder(self, block_hash: BlockHash, node: Node) -> None:
        found = self._holders.get(block_hash)
        if isinstance(found, set):
            found.add(node)
        elif found is not None:
            self._holders[block_hash] = {found, node}
        else:
            self._holders[block_hash] = node
            if self._new is not None:
                self._new.add(block_hash)
            if node.root is not UNSALTED_ROOT:
                self._events.append(Stored(block_hash))
            elif self._claims is not None:
                self._events += self._claims.add(block_hash)

    def remove_holder(self, block_hash: BlockHash, node: Node) -> None:
        found = self._holders[block_hash]
        if isinstance(found, set) and len(found) > 1:
            found.remove(node)
            return
        del self._holders[block_hash]
        self.stops.pop(block_hash, None)
        if node.root is not UNSALTED_ROOT:
            self._events.append(Removed(block_hash))
        elif self._claims is not None:
            self._events += self._claims.remove(block_hash)

    def publish_stops(self, moved: Iterable[Node], block_size: int) -> None:
        """Add an event for each block whose stop has changed. `moved`: the nodes whose stops have."""
        new = set(self._holders) if self._new is None else self._new
        new.update(block_hash for node in moved if node.is_visible for block_hash in node.later_hashes())
        for block_hash in new:
            if block_hash in self._holders:
                num_blocks = min(node.stop_at(block_hash, block_size) for node in self.of(block_hash)) // block_size
                if num_blocks != self.stops.get(block_hash, 0):
                    self._events.append(Stops(block_hash, num_blocks))
                self.stops[block_hash] = num_blocks
                if not num_blocks:
                    del self.stops[block_hash]
        self._new = set()

    def claim(self, root: BlockHash, token_ids: Sequence[int]) -> None:
        """Assign these tokens to the tenant of `root`, if the events carry no salt."""
        if self._claims is not None:
            self._events += self._claims.claim(root, token_ids)

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
        self._holders = {}
        self.stops = {}
        self._new = None if self._new is None else set()
        if self._claims is not None:
            self._claims.forget_held()
