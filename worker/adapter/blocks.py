"""Which blocks an engine holds, as events of our own blocks.

The engine names its blocks by opaque hashes and says which tokens are in them. Every block gets a node here, which has
the hashes of our blocks that end inside it. So any engine block size maps onto any of ours.

A node is held from a store to the next removal, however many copies the engine has: engines differ in what they count,
and some repeat the store of a block that they reuse. A copy that outlives a removal is proved by the next block behind
it. So a node is held only if the engine holds it. A node is visible while it is held, and so is every block before it.
Published are the hashes of the visible nodes whose root is known. So the set is prefix-closed.

After lost events nothing counts as held, but names stay: a block stored behind a parent proves all its ancestors.
Opaque is a block with no salt of ours, or with an image or prompt embeddings: counted, never published.
Events come from outside. A node has a parent only if that one's root is known, and keeps it: so no block is its own
ancestor. A name that comes behind two different parents says nothing about the blocks before it: it stays opaque.
Source: vllm/v1/core/block_pool.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from cache.events import BlockEvent, Removed, Stored
from cache.hashing import hash_chain
from cache.types import BlockHash
from worker.adapter.block_names import Names, Node
from worker.adapter.claims import UNSALTED_ROOT, RequestClaims
from worker.adapter.kv_events import GPU, AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, Event

MIN_WALKED: Final = 100_000
WALKS_PER_NODE: Final = 4
"""Bound of the nodes that one batch may show or hide. Beyond it, presence is forgotten and learnt again."""
_WHOLE_PREFIX_KINDS: Final = (None, "full_attention", "sink_full_attention", "mla_attention")
"""Kinds of a KV group in which every block of a prefix is needed, and kept, in order."""


class Applied(NamedTuple):
    """The outcome of a batch."""

    events: list[BlockEvent]
    """Those after the last reset, if there was one."""
    cleared: bool
    """The engine was reset: a new epoch begins before `events`."""


class EngineBlocks:
    """The blocks of one engine, or of one data-parallel rank. Has one owner; not thread-safe."""

    def __init__(self, block_size: int, *, max_names: int, matches_requests: bool = False) -> None:
        """`max_names` bounds the blocks that are remembered without being held; a few times the pool is right.

        `matches_requests`: the engine's events carry no salt (SGLang), so `expect` says whose blocks they are.
        """
        self.problem: str | None = None
        """Why nothing is published any more, or None."""
        self.engine_block_size = 1
        """The largest seen."""
        self._block_size = block_size
        self._max_names = max_names
        self._claims = RequestClaims(block_size, max_names) if matches_requests else None
        self._events: list[BlockEvent] = []
        self._nodes: dict[EngineHash, Node] = {}
        self._providers: dict[BlockHash, Node | set[Node]] = {}
        """The visible nodes that complete each of our blocks, mostly one. In the order of storing: parents first."""
        self._idle: OrderedDict[Node, None] = OrderedDict()
        """Neither held nor with children: the first names to forget, oldest first."""
        self._num_held = 0
        self._num_opaque = 0
        self._num_orphans = 0
        self._has_lost_events = False
        self._has_copies = False
        """A held block was stored again."""
        self._num_batches = 0
        self._num_walked = 0
        """Nodes that this batch has shown or hidden."""

    @property
    def matches_requests(self) -> bool:
        """`expect` says whose blocks are whose."""
        return self._claims is not None

    @property
    def num_batches(self) -> int:
        """The batches applied so far, by which `contradict` tells old evidence from new."""
        return self._num_batches

    @property
    def num_held_blocks(self) -> int:
        """The engine's blocks that are known to be held, of any kind."""
        return self._num_held

    @property
    def num_opaque(self) -> int:
        """Held blocks that are not published, as they have no salt of ours or more than tokens in them."""
        return self._num_opaque

    @property
    def num_orphans(self) -> int:
        """Held blocks that are not published, as a block before them is unknown."""
        return self._num_orphans

    def apply(self, events: Iterable[Event]) -> Applied:
        """Apply a batch. A batch that the engine sent after a gap needs `forget_presence` first."""
        cleared = False
        self._num_batches += 1
        self._num_walked = 0
        walked_too_far = False
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.clear()
                cleared = True
                walked_too_far = False
            elif walked_too_far or self.problem is not None or event.medium not in (None, GPU):
                continue
            elif event.group_idx or not _keeps_whole_prefixes(event):
                self._give_up(event)
            elif isinstance(event, BlockStored):
                self._store(event)
            else:
                self._remove(event)
            if self._num_walked > MIN_WALKED + WALKS_PER_NODE * len(self._nodes):
                # No engine evicts and stores the same chains over and over in a step: the batch counts as lost.
                walked_too_far = True
                self._forget_presence()
        self._forget_names()
        return Applied(self._take_events(), cleared)

    def expect(self, root: BlockHash, token_ids: Sequence[int]) -> list[BlockEvent]:
        """Note that a request with this root computes these tokens; only an engine without salts needs it.

        Call it before the engine gets the prompt, and at its end with the output.
        """
        if self._claims is not None and self.problem is None:
            self._events += self._claims.expect(root, token_ids)
        return self._take_events()

    def forget_presence(self) -> list[BlockEvent]:
        """Count no block as held, since events were lost. Names stay, so that later events prove what is there."""
        self._forget_presence()
        self._forget_names()
        return self._take_events()

    def contradict(
        self, root: BlockHash, prompt_ids: Sequence[int], num_found: int, promised_at: int
    ) -> list[BlockEvent]:
        """Withdraw what an engine has not found of a prompt, and all behind it.

        `num_found`: the prompt's tokens that it found. `promised_at` is `num_batches` of when it was promised more:
        what a later batch has stored, or proves, is there.
        """
        key_root = root if self._claims is None else UNSALTED_ROOT
        end = max(num_found + self.engine_block_size, num_found - num_found % self._block_size + self._block_size)
        hashes = hash_chain(key_root, prompt_ids[: end - end % self._block_size], self._block_size)
        if self.problem is not None or not hashes or len(hashes) * self._block_size <= num_found:
            return []
        for node in self._nodes_of(hashes[-1]):
            behind = [node]
            for each in behind:
                behind += each.children or ()
            if all(each.stored_at <= promised_at for each in behind):
                self._hide(node)
                for each in behind:
                    self._set_held(each, False)
        self._forget_names()
        return self._take_events()

    def clear(self) -> None:
        """Forget everything, as the engine was reset or has restarted: a new epoch begins, without events."""
        self._events = []
        self._nodes = {}
        self._providers = {}
        self._idle = OrderedDict()
        self._num_held = self._num_opaque = self._num_orphans = 0
        self._has_lost_events = False
        self._num_walked = 0
        if self._claims is not None:
            self._claims.clear_held()

    def visible_events(self) -> list[Stored]:
        """Return what is published now, parents first, to publish it again in a new epoch."""
        return [Stored(block_hash) for block_hash in self._published()]

    def num_matched_tokens(self, hashes: Sequence[BlockHash], num_prompt_tokens: int) -> int:
        """Return how many tokens of a prompt the engine should find, given the hashes of its full blocks.

        An engine finds whole blocks of its own, and always computes the last token.
        """
        published = self._published()
        num_matched = 0
        for block_hash in hashes:
            if block_hash not in published:
                break
            num_matched += 1
        num_tokens = min(num_matched * self._block_size, num_prompt_tokens - 1)
        return max(0, num_tokens - num_tokens % self.engine_block_size)

    def _published(self) -> dict[BlockHash, Any]:
        return self._providers if self._claims is None else self._claims.published

    def _take_events(self) -> list[BlockEvent]:
        events, self._events = self._events, []
        return events

    def _store(self, event: BlockStored) -> None:
        """Count each block as held, and name those that are new."""
        parent: Node | None = None
        is_orphan = False
        if event.parent_block_hash is not None:
            parent = self._nodes.get(event.parent_block_hash)
            is_orphan = parent is None or parent.is_orphan
            if parent is not None:
                self._prove(parent)
        self.engine_block_size = max(self.engine_block_size, event.block_size)
        names: Names | None = None
        for position, key in enumerate(event.block_hashes):
            node = self._nodes.get(key)
            if node is None:
                node = self._nodes[key] = Node(key, is_orphan)
            elif node.root is not None and (node.parent is not parent or is_orphan):
                self._make_ambiguous(node)
            if node.root is None and not node.is_ambiguous:
                if names is None:
                    names = Names(event, position, parent, is_orphan, self._block_size, self._claims is not None)
                self._name(node, parent, is_orphan, names, position)
            node.stored_at = self._num_batches
            self._has_copies = self._has_copies or node.is_held
            self._set_held(node, True)
            if not node.is_visible:
                self._show(node)
            parent = node
            is_orphan = node.is_orphan

    def _name(self, node: Node, parent: Node | None, is_orphan: bool, names: Names, position: int) -> None:
        """Give a node its place and its hashes, if its root is known. One that had no root may get one here."""
        was_held = node.is_held
        if was_held:
            self._hide(node)
            self._set_held(node, False)
        if node.parent is not parent:
            self._unlink(node)
            if parent is not None and parent.root is not None:
                node.parent = parent
                if parent.children is None:
                    parent.children = set()
                parent.children.add(node)
        node.is_orphan = is_orphan
        names.give(node, position)
        self._set_held(node, was_held)

    def _make_ambiguous(self, node: Node) -> None:
        """Make a node opaque for good, and forget the names of all behind it."""
        self._hide(node)
        behind = [node]
        for each in behind:
            behind += each.children or ()
        self._num_walked += len(behind)
        node.is_ambiguous = True
        for each in reversed(behind):
            was_held = each.is_held
            self._set_held(each, False)
            self._unlink(each)
            each.is_orphan = each is not node
            each.root = each.last = None
            each.hashes = each.tail = ()
            self._set_held(each, was_held)

    def _remove(self, event: BlockRemoved) -> None:
        counts = event.remaining_copy_counts
        if counts is None or len(counts) != len(event.block_hashes):
            counts = (0,) * len(event.block_hashes)
        for key, num_left in zip(event.block_hashes, counts, strict=True):
            node = self._nodes.get(key)
            if node is not None and node.is_held and not num_left:
                self._set_held(node, False)
                self._hide(node)

    def _set_held(self, node: Node, is_held: bool) -> None:
        """Count a node as held or not, and keep the totals."""
        if is_held is node.is_held:
            return
        step = 1 if is_held else -1
        self._num_held += step
        if node.is_orphan:
            self._num_orphans += step
        elif node.root is None:
            self._num_opaque += step
        if is_held:
            self._idle.pop(node, None)
        elif not node.children:
            self._idle[node] = None
        node.is_held = is_held

    def _prove(self, node: Node) -> None:
        """Count a node and all its ancestors as held: the engine has stored a block behind it."""
        highest: Node | None = None
        ancestor: Node | None = node
        node.stored_at = self._num_batches
        while ancestor is not None and not ancestor.is_visible:
            self._set_held(ancestor, True)
            highest, ancestor = ancestor, ancestor.parent
            self._num_walked += 1
        if highest is not None:
            self._show(highest)

    def _show(self, node: Node) -> None:
        """Make a held node visible, and the held nodes behind it, unless a block before it is missing."""
        if node.parent is not None and not node.parent.is_visible:
            return
        shown = [node]
        while shown:
            node = shown.pop()
            node.is_visible = True
            self._num_walked += 1
            for block_hash in node.hashes:
                self._provide(block_hash, node)
            if node.children:
                self._num_walked += len(node.children)
                shown += [child for child in node.children if child.is_held]

    def _hide(self, node: Node) -> None:
        """Make a node invisible, after the nodes behind it."""
        if not node.is_visible:
            return
        hidden = [node]
        for node in hidden:
            node.is_visible = False
            if node.children:
                self._num_walked += len(node.children)
                hidden += [child for child in node.children if child.is_visible]
        self._num_walked += len(hidden)
        for node in reversed(hidden):
            for block_hash in reversed(node.hashes):
                self._withdraw(block_hash, node)

    def _nodes_of(self, block_hash: BlockHash) -> list[Node]:
        """Return the visible nodes that complete one of our blocks."""
        found = self._providers.get(block_hash, ())
        return [found] if isinstance(found, Node) else list(found)

    def _provide(self, block_hash: BlockHash, node: Node) -> None:
        found = self._providers.get(block_hash)
        if isinstance(found, set):
            found.add(node)
        elif found is not None:
            self._providers[block_hash] = {found, node}
        else:
            self._providers[block_hash] = node
            if node.root is not UNSALTED_ROOT:
                self._events.append(Stored(block_hash))
            elif self._claims is not None:
                self._events += self._claims.store(block_hash)

    def _withdraw(self, block_hash: BlockHash, node: Node) -> None:
        found = self._providers[block_hash]
        if isinstance(found, set) and len(found) > 1:
            found.remove(node)
            return
        del self._providers[block_hash]
        if node.root is not UNSALTED_ROOT:
            self._events.append(Removed(block_hash))
        elif self._claims is not None:
            self._events += self._claims.remove(block_hash)

    def _forget_presence(self) -> None:
        self._withdraw_all()
        for node in self._nodes.values():
            node.is_held = False
            node.is_visible = False
        self._idle = OrderedDict.fromkeys(node for node in self._nodes.values() if not node.children)
        self._num_held = self._num_opaque = self._num_orphans = 0
        self._has_lost_events = True

    def _withdraw_all(self) -> None:
        self._events += [Removed(block_hash) for block_hash in reversed(self._published())]
        self._providers = {}
        if self._claims is not None:
            self._claims.clear_held()

    def _forget_names(self) -> None:
        """Drop blocks that are not held. Names help after lost events, and where a copy may be left: up to a bound."""
        max_names = self._max_names if self._has_lost_events or self._has_copies else 0
        while self._idle and len(self._nodes) - self._num_held > max_names:
            node, _ = self._idle.popitem(last=False)
            del self._nodes[node.key]
            self._unlink(node)

    def _unlink(self, node: Node) -> None:
        """Take a node from its parent, which may become idle."""
        parent = node.parent
        if parent is not None and parent.children is not None:
            node.parent = None
            parent.children.discard(node)
            if not parent.children and not parent.is_held:
                self._idle[parent] = None

    def _give_up(self, event: BlockStored | BlockRemoved) -> None:
        kind = event.kv_cache_spec_kind if isinstance(event, BlockStored) else None
        self.problem = (
            f"the engine's model keeps KV in groups (group {event.group_idx}, {kind or 'of unknown kind'}): "
            "a prefix counts only if all groups have it, so nothing is published"
        )
        self._withdraw_all()
        events = self._events
        self.clear()
        self._events = events


def _keeps_whole_prefixes(event: BlockStored | BlockRemoved) -> bool:
    return isinstance(event, BlockRemoved) or event.kv_cache_spec_kind in _WHOLE_PREFIX_KINDS
