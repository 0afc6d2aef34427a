"""Which blocks an engine holds, as events of our blocks.

The engine names its blocks by hashes of its own and lists the tokens in them. Every engine block gets a node
(`block_tree.py`), with the hashes of our blocks that end inside it (`block_names.py`). So any engine block size works
with any block size of the index. The hashes of visible nodes with a known root are published. They are a prefix-closed
set.

A model with windows or states has further KV groups (`groups.py`). Then each published block also has the position at
which a hit stops that matches up to it.

Blocks without a Headstart salt, or with prompt embeddings, are counted but not published. After lost events no block
counts as held, but names stay: a block stored after a parent marks all its ancestors as held.
Source: vllm/v1/core/block_pool.py.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Final, Literal, NamedTuple

from cache.events import BlockEvent, Stops, Stored
from cache.types import BlockHash
from worker.adapter.block_tree import BlockHolders, BlockTree, with_descendants
from worker.adapter.groups import KvGroups, PartKind
from worker.adapter.kv_events import GPU, AllBlocksCleared, BlockRemoved, BlockStored, Event

MIN_WALKED: Final = 100_000  # see WALKS_PER_NODE; a small tree has this allowance
WALKS_PER_NODE: Final = 4
"""Bound of the nodes that one batch may visit. Beyond it, held blocks are forgotten and learnt again."""

_NUM_PROMPTS: Final = 4
"""After more prompts of at least a block, windows of which no event came are kept as full attention."""


class Applied(NamedTuple):
    """The outcome of a batch."""

    events: list[BlockEvent]
    """Events after the last reset, if there was one."""
    cleared: bool
    """The engine was reset: a new epoch begins before `events`."""


class EngineBlocks:
    """The blocks of one engine, or of one data-parallel rank. Has one owner; not thread-safe."""

    def __init__(
        self,
        block_size: int,
        *,
        max_names: int,
        drops_last_block: bool = False,
        expected_parts: PartKind | None = None,
    ) -> None:
        """`max_names` bounds the blocks that are remembered without being held; use a few times the pool.

        `drops_last_block`: the engine computes the last block of a match again (EAGLE, MTP).
        `expected_parts`: what the model keeps of some layers. Nothing is promised before such blocks come.
        """
        self._stopped: str | None = None
        self.engine_block_size = 1
        """The largest seen."""
        self.num_batches = 0
        """Batches applied so far: the clock of `remove_missing`."""
        self._block_size = block_size
        self._max_names = max_names
        self._holders = BlockHolders()
        self.tree = BlockTree(self._holders, block_size, max_names)
        self._groups = KvGroups(self.tree, drops_last_block=drops_last_block, expected=expected_parts)
        self._num_prompts = self._counted_at = 0

    @property
    def problem(self) -> str | None:
        """Why nothing is published, or None."""
        if self._stopped is None and self._groups.is_needed and self._groups.has_only_parts:
            return "the engine's model has no full attention, so the positions of its blocks are not known"
        return self._stopped

    @property
    def ends(self) -> Literal["", "exact", "inexact"]:
        """Set if a hit may stop before the end of a match: `WorkerMember.ends`."""
        if not self._groups.is_needed:
            return ""
        return "inexact" if self._groups.has_states else "exact"

    def apply(self, events: Iterable[Event]) -> Applied:
        """Apply a batch. Call `forget_held` first if batches before it were lost."""
        cleared = False
        self.num_batches += 1
        self.tree.num_walked = 0
        walked_too_far = False
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.clear()
                cleared = True
                walked_too_far = False
            elif walked_too_far or self._stopped is not None or event.medium not in (None, GPU):
                continue
            elif not self._groups.is_tree(event):
                self._apply_part(event)
            elif isinstance(event, BlockStored):
                self._store(event)
            else:
                self._remove(event)
            if self.tree.num_walked > MIN_WALKED + WALKS_PER_NODE * len(self.tree):
                # No engine evicts and stores the same chains repeatedly in a step: treat the batch as lost.
                walked_too_far = True
                self._forget_held()
        return Applied(self._take_events(), cleared)

    def forget_held(self) -> list[BlockEvent]:
        """Count no block as held, because events were lost. Later events mark blocks as held again, by name."""
        self._forget_held()
        return self._take_events()

    def remove_missing(self, hashes: Sequence[BlockHash], num_found: int, at_batch: int) -> list[BlockEvent]:
        """Remove the blocks of a prompt that the engine did not find, and all blocks after them.

        `hashes`: those of the prompt's full blocks. `num_found`: the tokens that the engine found. `at_batch`:
        `num_batches` when the request was sent. Blocks that a later batch has stored or marked as held stay.
        """
        end = max(num_found + self.engine_block_size, num_found - num_found % self._block_size + self._block_size)
        first = hashes[: end // self._block_size]
        if self._stopped is not None or not first or len(first) * self._block_size <= num_found:
            return []
        for node in self._holders.of(first[-1]):
            missing = with_descendants(node)
            if all(each.stored_at <= at_batch for each in missing):
                for each in missing:
                    self.tree.release(each)
        return self._take_events()

    def record_prompt(self, num_tokens: int) -> list[BlockEvent]:
        """Note that the engine has answered a prompt: it has then stored blocks in every group of windows.

        Events may come later than the answer, so prompts count only if a batch came since the last one.
        """
        is_new = self.num_batches > self._counted_at and self.tree.num_held > 0
        if not is_new or num_tokens <= self.engine_block_size or self._num_prompts > _NUM_PROMPTS:
            return []
        self._counted_at = self.num_batches
        self._num_prompts += 1
        if self._num_prompts > _NUM_PROMPTS:
            self._groups.expect_no_windows()
        return self._take_events()

    def forget_adapters(self, lora_names: Container[str]) -> list[BlockEvent]:
        """Publish no block of unloaded LoRA adapters, if requests at a reloaded one do not find these blocks."""
        self.tree.forget_adapters(lora_names)
        return self._take_events()

    def clear(self) -> None:
        """Forget everything: the engine was reset or has restarted, and a new epoch begins. Emits no events."""
        self._holders = BlockHolders()
        self._forget_nodes()

    def visible_events(self) -> list[BlockEvent]:
        """Return all published blocks, parents first, and their stops, to publish them in a new epoch."""
        stops = [Stops(block_hash, num_blocks) for block_hash, num_blocks in self._holders.stops.items()]
        return [*map(Stored, self._holders.published), *stops]

    def num_matched_tokens(self, hashes: Sequence[BlockHash], num_prompt_tokens: int) -> int:
        """Return how many tokens of a prompt the engine should find, given the hashes of its full blocks.

        An engine finds whole blocks of its own, and always computes the last token.
        """
        published = self._holders.published
        num_matched = next((n for n, block_hash in enumerate(hashes) if block_hash not in published), len(hashes))
        if self._groups.is_needed:
            stops = (self._holders.stops.get(hashes[at - 1], 0) for at in (num_matched, num_matched - 1) if at > 0)
            return next((num * self._block_size for num in stops if num * self._block_size < num_prompt_tokens), 0)
        num_tokens = min(num_matched * self._block_size, num_prompt_tokens - 1)
        return max(0, num_tokens - num_tokens % self.engine_block_size)

    def _store(self, event: BlockStored) -> None:
        """Count each block as held, and name the new ones."""
        parent = None if event.parent_block_hash is None else self.tree.get(event.parent_block_hash)
        is_orphan = event.parent_block_hash is not None and (parent is None or parent.root is None)
        if parent is not None:
            parent.stored_at = self.num_batches
            self.tree.mark_ancestors_held(parent)
        self.engine_block_size = max(self.engine_block_size, event.block_size)
        if event.is_bigram:
            self._groups.drop_last_block()
        for position, key in enumerate(event.block_hashes):
            node = self.tree.get(key)
            if node is None:
                node = self.tree.add(key)
            elif node.root is not None and (node.parent is not parent or is_orphan):
                self.tree.make_ambiguous(node)
            if node.root is None and not node.is_ambiguous:
                self.tree.locate(node, parent, event, position)
            node.stored_at = self.num_batches
            self.tree.hold(node)
            parent = node
            is_orphan = node.root is None

    def _remove(self, event: BlockRemoved) -> None:
        for key, num_left in event.with_counts():
            node = self.tree.get(key)
            if node is not None and node.is_held and not num_left:
                self.tree.release(node)

    def _apply_part(self, event: BlockStored | BlockRemoved) -> None:
        """Apply an event of a group next to the tree's."""
        if isinstance(event, BlockRemoved):
            self._groups.remove(event)
        elif not self._groups.store(event):
            self._stop(event)

    def _take_events(self) -> list[BlockEvent]:
        """End a batch: return its events, with the stops that have changed."""
        if self._groups.is_needed:
            self._holders.publish_stops(self._groups.update_stops(), self._block_size)
        self.tree.forget_names()
        return self._holders.take_events()

    def _forget_held(self) -> None:
        self._holders.remove_all()
        self.tree.forget_held()
        self._groups.forget_held()

    def _stop(self, event: BlockStored) -> None:
        """Publish nothing any more: the rule of a KV group is not known."""
        kind = event.kv_cache_spec_kind or "of unknown kind"
        self._stopped = (
            f"the engine's model keeps KV in groups (group {event.group_idx}, {kind}): "
            "a prefix counts only if all groups have it, so nothing is published"
        )
        self._holders.remove_all()
        self._forget_nodes()

    def _forget_nodes(self) -> None:
        self.tree = BlockTree(self._holders, self._block_size, self._max_names)
        self._groups.clear(self.tree)
