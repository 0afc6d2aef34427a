"""Which blocks an engine holds, as events of our own blocks.

The engine names its blocks by opaque hashes and says which tokens are in them. Every block gets a node here, which has
the hashes of our blocks that end inside it. So any engine block size maps onto any of ours.

The count of a node never exceeds the copies in the engine. A node is visible while it is held, and so is every block
before it. Published are the hashes of the visible nodes whose root is known. So the set is prefix-closed.

After lost events nothing counts as held, but names stay: a block stored behind a parent proves all its ancestors.
Opaque is a block with no salt of ours, or with an image or prompt embeddings: counted, never published.
Sources: vllm/v1/core/block_pool.py; the count of copies is Dynamo's RefcountDedup.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from cache.events import BlockEvent, Removed, Stored
from cache.hashing import hash_chain
from cache.types import HASH_BYTES, BlockHash
from worker.adapter.claims import UNSALTED_ROOT, RequestClaims
from worker.adapter.kv_events import GPU, AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, Event

_SALT: Final = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")
_WHOLE_PREFIX_KINDS: Final = (None, "full_attention", "mla_attention")
"""Kinds of a KV group in which every block of a prefix is needed, and kept, in order."""


class Applied(NamedTuple):
    """The outcome of a batch."""

    events: list[BlockEvent]
    """Those after the last reset, if there was one."""
    cleared: bool
    """The engine was reset: a new epoch begins before `events`."""


class _Node:
    """A block of the engine."""

    __slots__ = ("children", "copies", "hashes", "is_orphan", "is_visible", "key", "last", "parent", "root", "tail")

    def __init__(self, key: EngineHash, parent: _Node | None, is_orphan: bool) -> None:
        self.key = key
        self.parent = parent
        self.is_orphan = is_orphan
        """A block before it is unknown, and with it the root."""
        self.children: set[_Node] | None = None
        self.copies = 0
        self.is_visible = False
        self.root: BlockHash | None = None
        self.hashes: Sequence[BlockHash] = ()
        """The hashes of our blocks that end inside this one."""
        self.last: BlockHash | None = None
        """The hash of our last block up to its end, or the root; None while the root is unknown."""
        self.tail: Sequence[int] = ()
        """The tokens behind `last`."""


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
        self._nodes: dict[EngineHash, _Node] = {}
        self._providers: dict[BlockHash, int] = {}
        """By how many visible nodes each of our blocks is completed. In the order of storing: parents first."""
        self._idle: OrderedDict[_Node, None] = OrderedDict()
        """Neither held nor with children: the first names to forget, oldest first."""
        self._num_held = 0
        self._num_opaque = 0
        self._num_orphans = 0
        self._has_lost_events = False

    @property
    def matches_requests(self) -> bool:
        """`expect` says whose blocks are whose."""
        return self._claims is not None

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
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.clear()
                cleared = True
            elif self.problem is not None or event.medium not in (None, GPU):
                continue
            elif event.group_idx or not _keeps_whole_prefixes(event):
                self._give_up(event)
            elif isinstance(event, BlockStored):
                self._store(event)
            else:
                self._remove(event)
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
        self._withdraw_all()
        for node in self._nodes.values():
            node.copies = 0
            node.is_visible = False
        self._idle = OrderedDict.fromkeys(node for node in self._nodes.values() if not node.children)
        self._num_held = self._num_opaque = self._num_orphans = 0
        self._has_lost_events = True
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
        """Count a copy of each block, and name those that are new."""
        parent: _Node | None = None
        is_orphan = False
        if event.parent_block_hash is not None:
            parent = self._nodes.get(event.parent_block_hash)
            is_orphan = parent is None or parent.is_orphan
            if parent is not None:
                self._prove(parent)
        self.engine_block_size = max(self.engine_block_size, event.block_size)
        names: _Names | None = None
        for position, key in enumerate(event.block_hashes):
            node = self._nodes.get(key)
            if node is None:
                node = self._nodes[key] = _Node(key, None, is_orphan)
            if node.root is None:
                if names is None:
                    names = _Names(event, position, parent, is_orphan, self._block_size, self._claims is not None)
                self._name(node, parent, is_orphan, names, position)
            self._set_copies(node, node.copies + 1)
            if not node.is_visible:
                self._show(node)
            parent = node
            is_orphan = node.is_orphan

    def _name(self, node: _Node, parent: _Node | None, is_orphan: bool, names: _Names, position: int) -> None:
        """Give a node its place and its hashes, if its root is known. One that had no root may get one here."""
        copies = node.copies
        if copies:
            self._hide(node)
            self._set_copies(node, 0)
        if node.parent is not parent:
            self._unlink(node)
        if parent is not None:
            node.parent = parent
            if parent.children is None:
                parent.children = set()
            parent.children.add(node)
        node.is_orphan = is_orphan
        names.give(node, position)
        self._set_copies(node, copies)

    def _remove(self, event: BlockRemoved) -> None:
        for key in event.block_hashes:
            node = self._nodes.get(key)
            if node is None or not node.copies:
                continue
            self._set_copies(node, node.copies - 1)
            if not node.copies:
                self._hide(node)

    def _set_copies(self, node: _Node, copies: int) -> None:
        """Change a node's count, and with it the totals."""
        if bool(copies) is not bool(node.copies):
            step = 1 if copies else -1
            self._num_held += step
            if node.is_orphan:
                self._num_orphans += step
            elif node.root is None:
                self._num_opaque += step
            if copies:
                self._idle.pop(node, None)
            elif not node.children:
                self._idle[node] = None
        node.copies = copies

    def _prove(self, node: _Node) -> None:
        """Count a node and all its ancestors as held: the engine has stored a block behind it."""
        highest: _Node | None = None
        ancestor: _Node | None = node
        while ancestor is not None and not ancestor.is_visible:
            if not ancestor.copies:
                self._set_copies(ancestor, 1)
            highest, ancestor = ancestor, ancestor.parent
        if highest is not None:
            self._show(highest)

    def _show(self, node: _Node) -> None:
        """Make a held node visible, and the held nodes behind it, unless a block before it is missing."""
        if node.parent is not None and not node.parent.is_visible:
            return
        shown = [node]
        while shown:
            node = shown.pop()
            node.is_visible = True
            for block_hash in node.hashes:
                self._provide(block_hash, node.root)
            if node.children:
                shown += [child for child in node.children if child.copies]

    def _hide(self, node: _Node) -> None:
        """Make a node invisible, after the nodes behind it."""
        if not node.is_visible:
            return
        hidden = [node]
        for node in hidden:
            node.is_visible = False
            if node.children:
                hidden += [child for child in node.children if child.is_visible]
        for node in reversed(hidden):
            for block_hash in reversed(node.hashes):
                self._withdraw(block_hash, node.root)

    def _provide(self, block_hash: BlockHash, root: BlockHash | None) -> None:
        num_providers = self._providers.get(block_hash, 0)
        self._providers[block_hash] = num_providers + 1
        if num_providers:
            return
        if root is not UNSALTED_ROOT:
            self._events.append(Stored(block_hash))
        elif self._claims is not None:
            self._events += self._claims.store(block_hash)

    def _withdraw(self, block_hash: BlockHash, root: BlockHash | None) -> None:
        num_providers = self._providers[block_hash]
        if num_providers > 1:
            self._providers[block_hash] = num_providers - 1
            return
        del self._providers[block_hash]
        if root is not UNSALTED_ROOT:
            self._events.append(Removed(block_hash))
        elif self._claims is not None:
            self._events += self._claims.remove(block_hash)

    def _withdraw_all(self) -> None:
        self._events += [Removed(block_hash) for block_hash in reversed(self._published())]
        self._providers = {}
        if self._claims is not None:
            self._claims.clear_held()

    def _forget_names(self) -> None:
        """Drop the blocks that are not held. Only after lost events are their names of use, up to the bound."""
        max_names = self._max_names if self._has_lost_events else 0
        while self._idle and len(self._nodes) - self._num_held > max_names:
            node, _ = self._idle.popitem(last=False)
            del self._nodes[node.key]
            self._unlink(node)

    def _unlink(self, node: _Node) -> None:
        """Take a node from its parent, which may become idle."""
        parent = node.parent
        if parent is not None and parent.children is not None:
            node.parent = None
            parent.children.discard(node)
            if not parent.children and not parent.copies:
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


class _Names:
    """The hashes of our blocks that end inside the blocks of one event, from the first one that has no name."""

    def __init__(
        self, event: BlockStored, first: int, parent: _Node | None, is_orphan: bool, block_size: int, unsalted: bool
    ) -> None:
        self._root: BlockHash | None = None
        num_blocks = len(event.block_hashes)
        keys = event.extra_keys or (None,) * num_blocks
        if is_orphan or len(event.token_ids) != event.block_size * num_blocks or len(keys) != num_blocks:
            return
        if parent is None:
            self._root = _salt(keys[first], event.lora_name)
            if self._root is None and unsalted and _is_plain(keys[first], event.lora_name):
                self._root = UNSALTED_ROOT
            last: BlockHash | None = self._root
        else:
            self._root = parent.root if _is_plain(keys[first], event.lora_name) else None
            last = parent.last
        if self._root is None or last is None:
            return
        named = next(
            (at for at in range(first + 1, num_blocks) if not _is_plain(keys[at], event.lora_name)), num_blocks
        )
        tail = () if parent is None else parent.tail
        self._tokens = [*tail, *event.token_ids[first * event.block_size : named * event.block_size]]
        self._hashes = [last, *hash_chain(last, self._tokens, block_size)]
        self._first = first
        self._end = named
        self._num_tail = len(tail)
        self._engine_block_size = event.block_size
        self._block_size = block_size

    def give(self, node: _Node, position: int) -> None:
        """Name the node of the block at a position of the event, or leave it opaque."""
        if self._root is None or position >= self._end:
            return
        begin = self._num_tail + (position - self._first) * self._engine_block_size
        end = begin + self._engine_block_size
        # The first block of an event completes what its parent's tail began; that tail is all before `begin`.
        num_before, num_done = begin // self._block_size, end // self._block_size
        node.root = self._root
        node.hashes = self._hashes[num_before + 1 : num_done + 1]
        node.last = self._hashes[num_done]
        node.tail = self._tokens[num_done * self._block_size : end] if end % self._block_size else ()


def _salt(keys: tuple[Any, ...] | None, lora_name: str | None) -> BlockHash | None:
    """Return the root that stands as salt in a first block's keys, behind the LoRA name if there is one."""
    names = () if lora_name is None else (lora_name,)
    if not keys or keys[:-1] != names or not isinstance(keys[-1], str) or not _SALT.fullmatch(keys[-1]):
        return None
    return BlockHash(bytes.fromhex(keys[-1]))


def _is_plain(keys: tuple[Any, ...] | None, lora_name: str | None) -> bool:
    """Say whether the tokens and the LoRA name are all that went into a block's hash, besides its parent."""
    return not keys or (lora_name is not None and keys == (lora_name,))
