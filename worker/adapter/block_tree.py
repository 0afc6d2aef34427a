"""An engine's blocks as a tree: which are held, and which are visible.

A node is held from a store to the next removal, however many copies the engine has: engines differ in what they count,
and some repeat the store of a block that they reuse. A block whose copy outlives the removal is held again when the
engine stores a block after it. A node is visible while it and all blocks before it are held.

Events are untrusted. A node gets a parent only if the parent's root is known, and keeps it. So no block is its own
ancestor. A name that comes after two different parents does not identify its prefix: its node gets no hashes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable

from cache.events import BlockEvent, Removed, Stops, Stored
from cache.types import BlockHash
from worker.adapter.block_names import Node
from worker.adapter.kv_events import BlockStored, EngineHash


class BlockHolders:
    """The nodes that hold each block of Headstart's, and an event for each change. Owned by `EngineBlocks`.

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
        """Blocks whose stop is not published yet; None: all."""

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
                if num_blocks != self.stops.pop(block_hash, 0):
                    self._events.append(Stops(block_hash, num_blocks))
                if num_blocks:
                    self.stops[block_hash] = num_blocks
        self._new = set()

    def remove_all(self) -> None:
        """Remove every holder."""
        self._events += [Removed(block_hash) for block_hash in reversed(self.published)]
        self.published, self.stops, self._new = {}, {}, None

    def take_events(self) -> list[BlockEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events


class BlockTree:
    """The nodes of one engine, by the engine's names. Owned by `EngineBlocks`."""

    def __init__(self, holders: BlockHolders, block_size: int, max_names: int) -> None:
        """`holders` receives our blocks of each node that becomes visible or invisible."""
        self.num_held = 0
        """Held nodes of any kind."""
        self.num_opaque = 0
        """Held nodes without hashes, not published.

        They have no Headstart salt, contain more than tokens, or come after an unknown block.
        """
        self.num_walked = 0
        """Nodes visited since the owner reset this."""
        self._holders = holders
        self._block_size = block_size
        self._max_names = max_names
        self._nodes: dict[EngineHash, Node] = {}
        self._idle: OrderedDict[Node, None] = OrderedDict()
        """Nodes that are not held and have no children, oldest first: the first to be forgotten."""
        self._has_lost_events = False
        self._has_copies = False
        """A held block was stored again."""
        self._located: set[Node] | None = None
        """The nodes with new hashes, for `KvGroups`; None for an engine without ends."""

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, key: EngineHash) -> Node | None:
        return self._nodes.get(key)

    def add(self, key: EngineHash) -> Node:
        node = self._nodes[key] = Node(key)
        return node

    def locate(self, node: Node, parent: Node | None, event: BlockStored, position: int) -> None:
        """Give a node its parent and its hashes, if its root is known. A node without a root may get one later."""
        was_held = node.is_held
        self._set_invisible(node)
        self._set_held(node, False)
        if node.parent is not parent:
            self._unlink(node)
            if parent is not None and parent.root is not None:
                node.parent = parent
                if parent.children is None:
                    parent.children = set()
                parent.children.add(node)
        if parent is not None or event.parent_block_hash is None:
            node.locate(event, position, parent, self._block_size)
        if self._located is not None:
            self._located.add(node)
        self._set_held(node, was_held)

    def hold(self, node: Node) -> None:
        """Count a node as held, because the engine has stored it."""
        self._has_copies = self._has_copies or node.is_held
        self._set_held(node, True)
        if not node.is_visible:
            self._set_visible(node)

    def release(self, node: Node) -> None:
        """Count a node as not held."""
        self._set_held(node, False)
        self._set_invisible(node)

    def mark_ancestors_held(self, node: Node) -> None:
        """Count a node and all its ancestors as held, because the engine has stored a block after it."""
        highest: Node | None = None
        ancestor: Node | None = node
        while ancestor is not None and not ancestor.is_visible:
            self._set_held(ancestor, True)
            highest, ancestor = ancestor, ancestor.parent
            self.num_walked += 1
        if highest is not None:
            self._set_visible(highest)

    def make_ambiguous(self, node: Node) -> None:
        """Take the hashes of a node, permanently, and those of all nodes after it."""
        self._set_invisible(node)
        nodes = with_descendants(node)
        self.num_walked += len(nodes)
        node.is_ambiguous = True
        for each in reversed(nodes):
            was_held = each.is_held
            self._set_held(each, False)
            self._unlink(each)
            each.root = each.last = None
            each.hashes = each.tail = ()
            self._set_held(each, was_held)

    def forget_adapters(self, lora_names: Container[str]) -> None:
        """Take the hashes of all blocks of these adapters (`Node.adapter`), permanently."""
        for node in self._nodes.values():
            if node.root is not None and node.parent is None and node.adapter in lora_names:
                self.make_ambiguous(node)

    def locate_all(self) -> None:
        """Count every node as placed, and later also those of new events."""
        self._located = set(self._nodes.values())

    def take_located(self) -> set[Node]:
        """Return the nodes that were placed since the last call."""
        placed, self._located = self._located or set(), set()
        return placed

    def forget_held(self) -> None:
        """Count no node as held, because events were lost. The holders are the owner's to remove."""
        for node in self._nodes.values():
            node.is_held = False
            node.is_visible = False
        self._idle = OrderedDict.fromkeys(node for node in self._nodes.values() if not node.children)
        self.num_held = self.num_opaque = 0
        self._has_lost_events = True

    def forget_names(self) -> None:
        """Drop nodes that are not held. After lost events, and where copies may be left, keep some."""
        max_names = self._max_names if self._has_lost_events or self._has_copies else 0
        while self._idle and len(self._nodes) - self.num_held > max_names:
            node, _ = self._idle.popitem(last=False)
            del self._nodes[node.key]
            self._unlink(node)

    def _set_held(self, node: Node, is_held: bool) -> None:
        """Count a node as held or not, and keep the totals."""
        if is_held is node.is_held:
            return
        step = 1 if is_held else -1
        self.num_held += step
        if node.root is None:
            self.num_opaque += step
        if is_held:
            self._idle.pop(node, None)
        elif not node.children:
            self._idle[node] = None
        node.is_held = is_held

    def _set_visible(self, node: Node) -> None:
        """Make a held node visible, and the held nodes after it, unless a block before it is missing."""
        if node.parent is not None and not node.parent.is_visible:
            return
        shown = [node]
        while shown:
            node = shown.pop()
            node.is_visible = True
            self.num_walked += 1
            for block_hash in node.hashes:
                self._holders.add_holder(block_hash, node)
            if node.children:
                self.num_walked += len(node.children)
                shown += [child for child in node.children if child.is_held]

    def _set_invisible(self, node: Node) -> None:
        """Make a node invisible, after the nodes that follow it."""
        if not node.is_visible:
            return
        hidden = [node]
        for node in hidden:
            node.is_visible = False
            if node.children:
                self.num_walked += len(node.children)
                hidden += [child for child in node.children if child.is_visible]
        self.num_walked += len(hidden)
        for node in reversed(hidden):
            for block_hash in reversed(node.hashes):
                self._holders.remove_holder(block_hash, node)

    def _unlink(self, node: Node) -> None:
        """Remove a node from its parent, which may become idle."""
        parent = node.parent
        if parent is not None and parent.children is not None:
            node.parent = None
            parent.children.discard(node)
            if not parent.children and not parent.is_held:
                self._idle[parent] = None


def with_descendants(node: Node) -> list[Node]:
    """Return a node and all nodes after it, parents first."""
    nodes = [node]
    for each in nodes:
        nodes += each.children or ()
    return nodes
