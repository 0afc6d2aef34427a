"""Where a hit may stop in an engine whose model keeps KV in several groups.

Full attention needs every block of a prefix, a window only its last blocks. A state is saved at one position. So a hit
stops at an *end*: a position where every group can go on. `KvGroups` adds the other groups to the tree of the full
attention's blocks. Hashes carry no group: a block has the same name in each, and the tree gives its position. A name
inside one of the tree's blocks has its position from the names around it.

vLLM with EAGLE or MTP computes the last matching block again. SGLang with EAGLE matches pairs of tokens, so the last
block of a match also needs the token after it. There a node's stop is one block lower. `part_kind` reads from the
model's configuration which groups are to be expected.
Source: vllm/v1/core/kv_cache_coordinator.py, single_type_kv_cache_manager.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from math import lcm
from pathlib import Path
from typing import Any, Final, Literal

from worker.adapter.block_names import Node
from worker.adapter.block_tree import BlockTree
from worker.adapter.kv_events import BlockRemoved, BlockStored, EngineHash

FULL_KINDS: Final = (None, "full_attention", "sink_full_attention", "mla_attention")
"""Kinds of a group in which every block of a prefix is needed, and kept, in order."""
_WINDOW_KINDS: Final = ("sliding_window", "sliding_window_mla")
_STATE_KIND: Final = "mamba"
_MAX_COPIES: Final = 100_000
"""With more names in a group's `copies`, they are dropped: every event that may report known blocks counts as one."""
_MAX_STEP: Final = 1 << 13
"""With a longer step between ends, none is published: real groups have block sizes with a small common multiple."""
_EXPECTED: Final = -1
"""The number of a group that must exist, and has sent nothing yet."""
_MIN_MARGIN: Final = 2
"""The engine always computes a prompt's last token, and pairs with it match nothing."""
_ALL: Final = 1 << 40
"""The run of a block if the group holds every block up to it."""
PartKind = Literal["windows", "states"]
"""The part that some layers keep of their KV: that of the last tokens, or a state."""
_STATES: Final = ("conv", "delta", "lightning", "linear", "mamba", "recurrent", "ssm")
"""Parts of the names of layers with a state."""
_STATE_FIELDS: Final = ("attn_type_list", "conv_L_cache", "hybrid_override_pattern", "layers_block_type")


@dataclass(slots=True)
class KvGroup:
    """The blocks that the engine holds in one group."""

    block_size: int
    num_needed: int
    """The blocks before an end that must be held, or `_ALL`."""
    is_state: bool
    held: set[EngineHash] = field(default_factory=set)
    copies: dict[EngineHash, int] = field(default_factory=dict)
    """How many copies of a name may be held, at most, besides the one in `held`. Names without one are omitted."""
    before: dict[EngineHash, EngineHash] = field(default_factory=dict)
    """The name before each name, where the tree's blocks are longer than this group's."""
    nodes: dict[EngineHash, set[EngineHash]] = field(default_factory=dict)
    """The names of nodes whose runs contain a name that is inside them."""

    def record_stored(self, names: Sequence[EngineHash], counted: Sequence[EngineHash]) -> None:
        """Note the names of an event, before those that count are held. Each may be one more copy."""
        first = set(counted).difference(self.held)
        for name in names:
            if name not in first:
                self.copies[name] = self.copies.get(name, 0) + 1

    def remove_copy(self, name: EngineHash, num_left: int | None) -> None:
        """Apply the removal of one copy. `num_left`: None for an engine that does not send how many are left."""
        if num_left is None and name not in self.held:
            num_left = max(0, self.copies.get(name, 0) - 1)
        if not num_left:
            self.held.discard(name)
        if num_left == 0:
            self.copies.pop(name, None)
        elif num_left is not None and name in self.copies:
            self.copies[name] = num_left

    @classmethod
    def of(cls, event: BlockStored) -> KvGroup | None:
        """Return the group of an event, or None for a kind whose rule is not known."""
        kind, size, window = event.kv_cache_spec_kind, event.block_size, event.kv_cache_spec_sliding_window
        if kind in _WINDOW_KINDS and window is not None and window > 0:
            return cls(size, -(-(window - 1) // size), False)
        if kind == _STATE_KIND:
            return cls(size, 1, True)
        return cls(size, _ALL, False) if kind in FULL_KINDS[1:] else None


class KvGroups:
    """The groups next to the tree's. Owned by `EngineBlocks`."""

    def __init__(self, tree: BlockTree, *, drops_last_block: bool, expected: PartKind | None) -> None:
        """`drops_last_block`: the engine computes the last block of a match again (EAGLE, MTP).

        `expected`: a kind of group that the model must have.
        """
        self._tree = tree
        self._drops_last_block = drops_last_block
        self._expected = expected
        self._groups: dict[int, KvGroup] = {}
        self._unknown: set[int] = set() if expected is None else {_EXPECTED}
        """Groups that must exist, whose kind is not known yet: until then, there is no end."""
        self._tree_group: int | None = None
        self._tree_block_size = 1
        self._has_lost_events = False
        """Blocks may be held that do not count."""
        self._changed: dict[int, set[EngineHash]] = {}
        """The names to look at, by group."""
        self._sparse: list[tuple[KvGroup, Sequence[EngineHash]]] = []
        """The names of events that leave out blocks, to be placed when the tree has the batch."""
        self._has_new_rule = True
        """A group, a block size or the tree is new: every node is looked at."""

    def drop_last_block(self) -> None:
        """Promise one block less than what matches: a hit on the last block also needs the token after it."""
        self._has_new_rule = self._has_new_rule or not self._drops_last_block
        self._drops_last_block = True

    def expect_no_windows(self) -> None:
        """Stop waiting for a group of windows: the engine keeps the model's windows as full attention."""
        if self._expected == "windows" and _EXPECTED in self._unknown:
            self._unknown.remove(_EXPECTED)
            self._has_new_rule = True

    @property
    def is_needed(self) -> bool:
        """True if a hit may stop before the end of a match."""
        return bool(self._groups or self._unknown) or self._drops_last_block or self._expected is not None

    @property
    def has_states(self) -> bool:
        return any(group.is_state for group in self._groups.values())

    @property
    def has_only_parts(self) -> bool:
        """True if blocks have come, but none of a group of full attention."""
        return self._tree_group is None and any(group.held for group in self._groups.values())

    @property
    def step(self) -> int:
        """Ends are multiples of this many tokens: of the blocks of every group."""
        return lcm(self._tree_block_size, *(group.block_size for group in self._groups.values()))

    def is_tree(self, event: BlockStored | BlockRemoved) -> bool:
        """Return whether an event is of the tree's group: the first of full attention."""
        index = event.group_idx or 0
        is_first = self._tree_group is None and index not in self._groups
        kinds = FULL_KINDS[1:] if index else FULL_KINDS  # older engines have one group, and name no kind
        if is_first and isinstance(event, BlockStored) and event.kv_cache_spec_kind in kinds:
            self._tree_group = index
            self._unknown.discard(index)
            self._add_unknown(range(index))
        if index == self._tree_group and isinstance(event, BlockStored) and event.block_size > self._tree_block_size:
            self._tree_block_size = event.block_size
            self._has_new_rule = True
        return index == self._tree_group and (isinstance(event, BlockRemoved) or event.kv_cache_spec_kind in FULL_KINDS)

    def store(self, event: BlockStored) -> bool:
        """Apply an event of another group. False: its kind is not known."""
        index = event.group_idx or 0
        group = self._groups.get(index)
        if group is None:
            group = KvGroup.of(event)
            if group is None or index == self._tree_group:
                return False
            self._groups[index] = group
            self._unknown -= {index, _EXPECTED}
            self._has_new_rule = True
        names: Sequence[EngineHash] = event.block_hashes
        is_whole = len(names) * event.block_size == len(event.token_ids)
        if is_whole and event.parent_block_hash is None and names:
            names = self._without_report(group, names)
        if not self._has_lost_events:
            group.record_stored(event.block_hashes, names)
            if len(group.copies) > _MAX_COPIES:
                group.copies.clear()
                self._has_lost_events = True
        self._changed.setdefault(index, set()).update(names)
        group.held.update(names)
        if group.block_size < self._tree_block_size or self._tree_group is None:
            if is_whole:
                first = () if event.parent_block_hash is None else (event.parent_block_hash,)
                self._link(group, [*first, *names])
            elif names and not self._drops_last_block:
                self._sparse.append((group, names))
        return True

    def remove(self, event: BlockRemoved) -> None:
        """Apply an event of another group."""
        index = event.group_idx or 0
        group = self._groups.get(index)
        if group is None:
            self._add_unknown([index] if index else [])
            return
        self._changed.setdefault(index, set()).update(event.block_hashes)
        for name, num_left in event.with_counts():
            group.remove_copy(name, num_left)

    def clear(self, tree: BlockTree) -> None:
        """Forget every block, and keep what is known of the groups. `tree`: it may be a new one."""
        self._tree = tree
        for group in self._groups.values():
            group.held, group.copies, group.before, group.nodes = set(), {}, {}, {}
        self._changed, self._sparse = {}, []
        self._has_lost_events, self._has_new_rule = False, True

    def forget_held(self) -> None:
        """Count no block as held, because events were lost."""
        self.clear(self._tree)
        self._has_lost_events = True

    def update_stops(self) -> list[Node]:
        """Bring the stops up to date after a batch. Return the nodes whose stop has changed."""
        self._link_sparse()
        if self._has_new_rule:
            self._has_new_rule = False
            self._tree.locate_all()
        queue: list[tuple[int, int, Node]] = []
        queued: set[Node] = set()

        def enqueue(node: Node | None) -> None:
            if node is not None and node.root is not None and node not in queued:
                queued.add(node)
                heappush(queue, (node.num_tokens, id(node), node))

        for touched in self._take_touched():
            enqueue(touched)
        step = self.step
        margin = max(step, _MIN_MARGIN) if self._drops_last_block else 0
        moved = []
        while queue:  # nodes in the order of their positions: each depends only on nodes before it
            _, _, node = heappop(queue)
            self._tree.num_walked += 1
            if self._update_runs(node, margin):
                for later in _descendants(node, min(step, _MAX_STEP)):
                    enqueue(later)
            stop = self._stop(node, step, margin)
            if stop != node.stop:
                node.stop = stop
                moved.append(node)
                for child in node.children or ():
                    enqueue(child)
        return moved

    def _take_touched(self) -> Iterator[Node | None]:
        """Yield the nodes that were located, and those whose names a group has stored or removed."""
        yield from self._tree.take_located()
        for index, names in self._changed.items():
            group = self._groups[index]
            for name in names:
                yield self._tree.get(name)
                yield from map(self._tree.get, group.nodes.get(name, ()))
                if name not in group.held:
                    group.nodes.pop(name, None)
                    group.before.pop(name, None)
        self._changed = {}

    def _add_unknown(self, indices: Iterable[int]) -> None:
        """Add the groups that must exist, as the engine numbers its groups from 0."""
        new = set(indices) - self._groups.keys() - self._unknown
        self._unknown |= new
        self._has_new_rule |= bool(new)

    def _without_report(self, group: KvGroup, names: Sequence[EngineHash]) -> Sequence[EngineHash]:
        """Return which names of an event that begins a prompt are held for sure.

        An engine may report again what a request reuses (`kv_cache_report_mode`). It then names every block of the
        prefix, also those that this group does not hold. It ends at an end, so the group holds the last ones.
        """
        last = names[max(0, len(names) - group.num_needed) :]
        may_be_held = all(name in group.held or name in group.copies for name in last)
        return last if may_be_held or self._has_lost_events else names

    def _link(self, group: KvGroup, names: Sequence[EngineHash]) -> None:
        """Note the order of names of adjacent blocks."""
        for name, later in pairwise(names):
            group.before[later] = name

    def _link_sparse(self) -> None:
        """Place names inside the tree's blocks: an engine keeps those right before the end of a block of the tree."""
        for group, names in self._sparse:
            run: list[EngineHash] = []
            for name in names:
                run.append(name)
                node = self._tree.get(name)
                if node is not None:
                    self._link(group, run[-self._tree_block_size // group.block_size :])
                    run = []
        self._sparse = []

    def _update_runs(self, node: Node, margin: int) -> bool:
        """Compute how many adjacent blocks each group holds that end at a node. Return whether one has changed."""
        before, node.runs = node.runs, {}
        for index, group in self._groups.items():
            if node.key in group.held and (run := self._run(index, group, node)):
                node.runs[index] = min(run, group.num_needed + margin // group.block_size)
        return node.runs != (before or {})

    def _run(self, index: int, group: KvGroup, node: Node) -> int:
        """Return the run of a held block; `_ALL` if it reaches the start of the prompt."""
        if node.num_tokens % group.block_size:
            return 0
        if group.is_state:
            return 1
        start = node.num_tokens - group.block_size
        parent = node.parent
        while parent is not None and parent.num_tokens > start:
            parent = parent.parent
        begin = 0 if parent is None else parent.num_tokens
        run = 1
        name = node.key
        while begin < start:
            if name not in group.before or group.before[name] not in group.held:
                return run
            name = group.before[name]
            group.nodes.setdefault(name, set()).add(node.key)
            run += 1
            start -= group.block_size
        if begin > start:
            return run
        if parent is None:
            return _ALL
        return min(_ALL, (parent.runs or {}).get(index, 0) + run)

    def _stop(self, node: Node, step: int, margin: int) -> int:
        """Return the last end at or before a node."""
        end = node.num_tokens - margin
        before = 0 if node.parent is None else node.parent.stop
        if end <= 0 or end % step or step > _MAX_STEP or self._unknown:
            return before
        runs = node.runs or {}
        for index, group in self._groups.items():
            if group.is_state:
                at: Node | None = node
                while at is not None and at.num_tokens > end:
                    at = at.parent
                if at is None or at.num_tokens != end or at.key not in group.held:
                    return before
            elif (run := runs.get(index, 0)) < _ALL and run < group.num_needed + margin // group.block_size:
                return before
        return end


def _descendants(node: Node, distance: int) -> Iterator[Node]:
    """Yield the nodes after a node, up to a distance in tokens and at least the next ones."""
    last = node.num_tokens + distance
    stack = [node]
    while stack:
        for child in stack.pop().children or ():
            yield child
            if child.num_tokens < last:
                stack.append(child)


def part_kind(folder: Path) -> PartKind | None:
    """Return what some layers keep: the last tokens, or a state; None if all keep everything, or it is not known."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        return _kind_of(config.get("text_config") or config)
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def _kind_of(fields: dict[str, Any]) -> PartKind | None:
    layer_types = fields.get("layer_types")
    if isinstance(layer_types, list) and layer_types:
        names = {str(name) for name in layer_types}
        has_states = any(state in name for name in names for state in _STATES)
        has_windows = any("sliding" in name for name in names)
    else:
        has_states = any(name in _STATE_FIELDS or name.startswith(("mamba_", "ssm_")) for name in fields)
        has_windows = bool(fields.get("sliding_window")) and fields.get("use_sliding_window") is not False
    return "states" if has_states else "windows" if has_windows else None
