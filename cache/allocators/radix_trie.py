"""A radix trie from token prefixes to the blocks that hold their KV.

Source: TGI v3, RadixTrie; a hold counts at every node up to the root, as SGLang's `lock_ref` does.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from cache.types import BlockHash, BlockId

Key = Hashable


@dataclass(slots=True, eq=False)
class RadixNode:
    """A run of keys without a branch, below those of its parents."""

    id: int
    parent: RadixNode | None
    keys: list[Key] = field(default_factory=list)
    block_ids: list[BlockId] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    children: dict[Key, RadixNode] = field(default_factory=dict)
    num_holders: int = 0
    """Holds on this node and on everything below."""
    last_accessed: int = 0
    is_queued: bool = False
    """It has an entry in the heap of leaves, which may be outdated."""

    def path(self) -> Iterator[RadixNode]:
        """Yield this node and all above it, up to the root."""
        node: RadixNode | None = self
        while node is not None:
            yield node
            node = node.parent

    def check_links(self) -> None:
        """Assert what holds between a node, its parent and its children."""
        for key, child in self.children.items():
            assert child.keys[0] == key, f"node {child.id} is found under {key}"
            assert child.parent is self, f"node {child.id} has another parent"
        if self.parent is None:
            assert self.num_holders or self.children, f"root {self.id} is of no use"
            return
        assert self.keys, f"node {self.id} is empty"
        assert len(self.keys) == len(self.block_ids) == len(self.hashes), f"node {self.id} is ragged"
        assert self.num_holders or self.parent.last_accessed >= self.last_accessed, "a parent older than its child"


@dataclass(frozen=True, slots=True)
class Match:
    """The blocks of a matching prefix. It ends in node `last`, perhaps before the end of its keys."""

    last: RadixNode
    num_in_last: int
    """Matching keys of `last`."""
    block_ids: list[BlockId]
    num_evictable: int
    """The blocks without a holder."""


class RadixTrie:
    """A trie whose nodes map each key to one block. A key is a token, or the tuple of a block's tokens.

        root --[ a b c ]--+--[ d e ]          match(a b c d x) -> the blocks of a b c d
                          +--[ f ]            evict(1)         -> the tail of the least recently used leaf

    `num_holders` of a node counts holds on it and below it. Such a node is not evicted, so the number of evictable
    blocks is known at any time. Every namespace (tenant, model) has its own root.
    """

    __slots__ = ("_ids", "_leaves", "_roots", "num_blocks", "num_evictable", "time")

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._roots: dict[Hashable, RadixNode] = {}
        self._leaves: list[tuple[int, int, RadixNode]] = []
        self.num_blocks = 0
        self.num_evictable = 0
        self.time = 0
        """Logical clock: counts finds and inserts."""

    def root(self, namespace: Hashable = None) -> RadixNode:
        """Return the root of a namespace; the trie keeps it only while it is held or has children."""
        root = self._roots.get(namespace)
        return RadixNode(next(self._ids), None, keys=[namespace]) if root is None else root

    def match(self, node: RadixNode, keys: Sequence[Key]) -> Match:
        """Return the longest prefix of `keys` below `node`. Changes nothing."""
        block_ids: list[BlockId] = []
        shared, num_evictable = len(node.keys), 0
        while len(block_ids) < len(keys) and (child := node.children.get(keys[len(block_ids)])) is not None:
            node, shared = child, _shared_length(child.keys, keys, len(block_ids))
            block_ids += node.block_ids[:shared]
            num_evictable += 0 if node.num_holders else shared
            if shared < len(node.keys):
                break
        return Match(node, shared, block_ids, num_evictable)

    def hold(self, match: Match) -> RadixNode:
        """Mark a match as used and keep exactly its blocks from eviction, until the returned node is released."""
        node = self._split(match)
        self._touch(node)
        self.hold_path(node)
        return node

    def hold_path(self, node: RadixNode, held: RadixNode | None = None) -> None:
        """Hold `node` and the nodes above it, up to the root or to `held`, which the caller holds already."""
        for above in node.path():
            if above is held:
                return
            if not above.num_holders:
                self.num_evictable -= len(above.block_ids)
            above.num_holders += 1
            self._keep_if_root(above)
        assert held is None, "the held node is not above the other one"

    def release(self, node: RadixNode) -> None:
        """Release a hold on `node` and on the nodes above it."""
        last_accessed = 0
        for above in node.path():
            assert above.num_holders > 0, f"node {above.id} is released but not held"
            above.num_holders -= 1
            # `insert` into a held leaf updates the time of that leaf only. It reaches the nodes above here.
            above.last_accessed = last_accessed = max(above.last_accessed, last_accessed)
            if not above.num_holders:
                self.num_evictable += len(above.block_ids)
                self._queue_if_unused(above)

    def insert(
        self, node: RadixNode, keys: Sequence[Key], block_ids: Sequence[BlockId], hashes: Sequence[BlockHash] = ()
    ) -> tuple[list[BlockId], RadixNode]:
        """Add blocks below `node`. Return the blocks that known keys have already, and the last node.

        A leaf grows if the caller is its only holder: no other hold ends there.
        """
        assert len(keys) == len(block_ids), f"{len(keys)} keys for {len(block_ids)} blocks"
        if node.parent is not None and not node.children and node.num_holders == 1:
            self.time += 1
            node.last_accessed = self.time
            node.keys += keys
            node.block_ids += block_ids
            node.hashes += hashes
            self.num_blocks += len(keys)
            return [], node
        match = self.match(node, keys)
        num_known = len(match.block_ids)
        node = self._split(match)
        self._touch(node)
        if num_known == len(keys):
            return match.block_ids, node
        rest = list(keys[num_known:]), list(block_ids[num_known:]), list(hashes[num_known:])
        child = node.children[keys[num_known]] = RadixNode(next(self._ids), node, *rest, last_accessed=self.time)
        self._keep_if_root(node)
        self.num_blocks += len(child.keys)
        self.num_evictable += len(child.keys)
        self._queue_if_unused(child)
        return match.block_ids, child

    def evict(self, num_blocks: int) -> tuple[list[BlockId], list[BlockHash]]:
        """Drop `num_blocks` blocks, or as many as are evictable, from the leaves that were used least recently.

        A leaf with more blocks than needed loses its last ones. Return the blocks, in order within each leaf, and their
        hashes, every child before its parent.
        """
        block_ids: list[BlockId] = []
        hashes: list[BlockHash] = []
        while len(block_ids) < num_blocks and (leaf := self._pop_oldest_leaf()) is not None:
            first = max(0, len(leaf.keys) - (num_blocks - len(block_ids)))
            block_ids += leaf.block_ids[first:]
            hashes += reversed(leaf.hashes[first:])
            self.num_blocks -= len(leaf.keys) - first
            self.num_evictable -= len(leaf.keys) - first
            if first:
                del leaf.keys[first:], leaf.block_ids[first:], leaf.hashes[first:]
                self._queue_if_unused(leaf)
            else:
                assert leaf.parent is not None, "a root cannot be evicted"
                del leaf.parent.children[leaf.keys[0]]
                self._queue_if_unused(leaf.parent)
        return block_ids, hashes

    def oldest_access(self) -> int | None:
        """Return when the next victim was used last, or None without a victim."""
        leaf = self._pop_oldest_leaf()
        if leaf is None:
            return None
        self._queue_if_unused(leaf)
        return leaf.last_accessed

    def nodes(self) -> Iterator[RadixNode]:
        """Return every node, roots included, parents before children."""
        pending = list(self._roots.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def check_integrity(self, held: Sequence[RadixNode]) -> None:
        """Assert the invariants; `held` has one node per hold. Linear."""
        holders: dict[RadixNode, int] = {}
        for above in itertools.chain.from_iterable(node.path() for node in held):
            holders[above] = holders.get(above, 0) + 1
        queued = {id(node) for _, _, node in self._leaves}
        num_blocks = num_evictable = 0
        for node in self.nodes():
            num_blocks += len(node.block_ids)
            num_evictable += 0 if node.num_holders else len(node.block_ids)
            assert node.num_holders == holders.pop(node, 0), f"node {node.id} counts {node.num_holders} holders"
            assert node.is_queued == (id(node) in queued), f"node {node.id} queued: {node.is_queued}"
            assert node.is_queued or not _is_evictable_leaf(node), f"node {node.id} would never be evicted"
            node.check_links()
        assert not holders, "a held node is not in the trie"
        assert (self.num_blocks, self.num_evictable) == (num_blocks, num_evictable), "counts of blocks are wrong"
        assert len(queued) == len(self._leaves), "a leaf is queued twice"

    def _touch(self, node: RadixNode) -> None:
        """Mark a node and all above it as used."""
        self.time += 1
        for above in node.path():
            above.last_accessed = self.time

    def _split(self, match: Match) -> RadixNode:
        """Return a node that ends where the match ends. A hold on a node that is split is a hold on both parts."""
        node, length, parent = match.last, match.num_in_last, match.last.parent
        if length == len(node.keys):
            return node
        assert parent is not None, "a root cannot be split"
        upper = RadixNode(next(self._ids), parent, node.keys[:length], node.block_ids[:length], node.hashes[:length])
        upper.num_holders = node.num_holders
        upper.last_accessed = node.last_accessed
        del node.keys[:length], node.block_ids[:length], node.hashes[:length]
        parent.children[upper.keys[0]] = upper
        upper.children[node.keys[0]] = node
        node.parent = upper
        return upper

    def _keep_if_root(self, node: RadixNode) -> None:
        """Keep the root of a namespace that is in use: `root` makes one that the trie does not have yet."""
        if node.parent is None:
            assert self._roots.setdefault(node.keys[0], node) is node, f"two roots of {node.keys[0]!r}"

    def _queue_if_unused(self, node: RadixNode) -> None:
        """Queue a leaf without holders for eviction. Drop such a root: it has no blocks."""
        if not _is_evictable_leaf(node):
            return
        if node.parent is None:
            self._roots.pop(node.keys[0], None)
        elif not node.is_queued:
            node.is_queued = True
            heapq.heappush(self._leaves, (node.last_accessed, node.id, node))

    def _pop_oldest_leaf(self) -> RadixNode | None:
        """Take the least recently used evictable leaf. Drop outdated entries, and queue used nodes again."""
        while self._leaves:
            queued_at, _, node = heapq.heappop(self._leaves)
            node.is_queued = False
            if queued_at != node.last_accessed:
                self._queue_if_unused(node)
            elif _is_evictable_leaf(node):
                return node
        return None


def _is_evictable_leaf(node: RadixNode) -> bool:
    return not node.children and not node.num_holders


def _shared_length(node_keys: Sequence[Key], keys: Sequence[Key], start: int) -> int:
    length = min(len(node_keys), len(keys) - start)
    for index in range(length):
        if node_keys[index] != keys[start + index]:
            return index
    return length
