"""The block pool of a simulated engine with several KV groups, by vLLM's rule for a hit.

Source: vllm/v1/core/kv_cache_coordinator.py, single_type_kv_cache_manager.py, block_pool.py.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from hashlib import blake2b
from math import gcd, lcm

from cache.types import BlockHash
from worker.adapter.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event

Prompt = tuple[BlockHash, tuple[int, ...]]
"""Salt and tokens."""


@cache
def _name(salt: BlockHash, tokens: tuple[int, ...]) -> int:
    return int.from_bytes(blake2b(salt + bytes(tokens), digest_size=8).digest())


@dataclass(frozen=True)
class Group:
    kind: str
    block_size: int
    length: int = 0
    """The window, in tokens."""

    @property
    def is_full(self) -> bool:
        return self.kind in ("full_attention", "mla_attention", "sink_full_attention")

    def num_needed(self, drops: bool) -> int:
        return -(-(self.length - 1) // self.block_size) + drops


@dataclass
class GroupedEngine:
    groups: Sequence[Group]
    eagle: bool = False
    is_dense: bool = False
    """Windows keep every block (--prefix-cache-retention-interval None), not only those before the last end."""
    counts_copies: bool = False
    """Removals come with the number of remaining copies."""
    copies: dict[tuple[int, int], int] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    parted: set[tuple[int, int]] = field(default_factory=set)
    """Blocks that a reader may miss if it does not count: one copy was removed and another is left, or so it was for
    the parent when they were stored."""

    has_doubtful_events: bool = False
    """It has sent an event that could also be a report of blocks in use."""
    has_gap: bool = False
    """Events were lost since the last reset."""
    known: set[tuple[int, int]] = field(default_factory=set)
    """Blocks that a reader must count as held: by what it was sent since the last gap."""
    possible: dict[tuple[int, int], int] = field(default_factory=dict)
    """The most copies of each block that the events allow: a report could also be a store."""

    @cached_property
    def hash_size(self) -> int:
        return gcd(*(group.block_size for group in self.groups))

    @cached_property
    def step(self) -> int:
        return lcm(*(group.block_size for group in self.groups))

    def names(self, prompt: Prompt, block_size: int) -> list[int]:
        """The names of a prompt's full blocks: hashes of everything up to their ends."""
        salt, tokens = prompt
        return [_name(salt, tokens[:end]) for end in range(block_size, len(tokens) + 1, block_size)]

    # --- the rule -----------------------------------------------------------------------------------------------

    def last_end(self, prompt: Prompt, blocks: Container[tuple[int, int]]) -> int:
        """The last position before a prompt's last token at which every group can go on, if it holds `blocks`.

        With EAGLE, every group then also holds the next block. The fixed point may find more: it looks for that block
        of a group only once, and then lowers the length for another group.
        """
        for end in range((len(prompt[1]) - 1) // self.step * self.step, 0, -self.step):
            if all(self._goes_on(index, prompt, end, blocks) for index in range(len(self.groups))):
                return end
        return 0

    def _goes_on(self, index: int, prompt: Prompt, end: int, blocks: Container[tuple[int, int]]) -> bool:
        group, size = self.groups[index], self.groups[index].block_size
        names = self.names(prompt, size)
        last = end // size + (self.eagle and group.kind != "mamba")
        if last > len(names):
            return False
        needed = 1 if group.kind == "mamba" else last if group.is_full else group.num_needed(self.eagle)
        return all((index, name) in blocks for name in names[max(0, last - needed) : last])

    def find(self, prompt: Prompt) -> int:
        """The tokens of a prompt that it finds: a fixed point over the groups, the full ones first."""
        order = sorted(range(len(self.groups)), key=lambda index: not self.groups[index].is_full)
        length = len(prompt[1]) - 1
        verified: set[int] = set()
        while True:
            current = length
            for index in order:
                group = self.groups[index]
                drops = self.eagle and index not in verified
                most = current
                if drops and group.kind != "mamba":
                    most = min(current + group.block_size, len(prompt[1]) // self.hash_size * self.hash_size)
                found = self._find_in(index, prompt, most, drops)
                if drops:
                    verified.add(index)
                elif found < current:
                    verified.clear()
                current = min(current, found)
            if current >= length:
                return length
            length = current

    def _find_in(self, index: int, prompt: Prompt, most: int, drops: bool) -> int:
        group, size = self.groups[index], self.groups[index].block_size
        held = [(index, name) in self.copies for name in self.names(prompt, size)][: most // size]
        if group.is_full:
            num = next((at for at, is_held in enumerate(held) if not is_held), len(held))
            length = max(0, num - drops) * size
            return length - length % self.step
        if group.kind == "mamba":
            ends = [(at + 1) * size for at, is_held in enumerate(held) if is_held]
            return max((end for end in ends if end % self.step == 0), default=0)
        needed = group.num_needed(drops)
        for end in range(len(held), 0, -1):  # blocks up to the end of the run, of which the last may be dropped
            kept = end - drops
            run = held[max(0, end - needed) : end]
            if kept * size % self.step == 0 and all(run):
                return kept * size
        return 0

    # --- what it does -------------------------------------------------------------------------------------------

    def serve(self, prompt: Prompt, chunk: int, *, reports: bool = False) -> int:
        """Compute a prompt, by `chunk` steps of `self.step` tokens. Return the tokens that it has found."""
        found = self.find(prompt)
        if reports and found:
            for index, group in enumerate(self.groups):
                names = self.names(prompt, group.block_size)[: found // group.block_size]
                self._say_stored(index, prompt, 0, found, names)
        num_tokens = len(prompt[1])
        begin = found
        while begin < num_tokens:
            end = min(num_tokens, begin - begin % self.step + chunk * self.step)
            for index, group in enumerate(self.groups):
                self._store(index, group, prompt, found, begin, end)
            begin = end
        return found

    def _cacheable(self, num_tokens: int, size: int) -> int:
        aligned = num_tokens - num_tokens % self.step
        return min(num_tokens, aligned + size) if self.eagle and aligned else aligned

    def _store(self, index: int, group: Group, prompt: Prompt, found: int, begin: int, end: int) -> None:
        size = group.block_size
        first = (found if begin == found else self._cacheable(begin, size)) // size
        last = self._cacheable(end, size) // size
        if last <= first:
            return
        names = self.names(prompt, size)
        kept = [
            names[at]
            for at in range(first, last)
            if self._keeps(group, at, len(prompt[1]), last - 1) and at * size + size > begin - max(1, group.length)
        ]
        needed = 1 if group.kind == "mamba" else group.num_needed(False)
        learnt = kept
        if not group.is_full and not first and len(kept) == last and len(kept) > needed:
            is_doubtful = self.has_gap or all((index, name) in self.possible for name in kept[len(kept) - needed :])
            self.has_doubtful_events = self.has_doubtful_events or is_doubtful
            learnt = kept[len(kept) - needed :] if is_doubtful else kept
        is_after_known = not group.is_full or not first or (index, names[first - 1]) in self.known
        if is_after_known:
            self.known.update((index, name) for name in learnt)
        self._say_stored(index, prompt, first * size, last * size, kept)
        for name in kept:
            self.copies[index, name] = self.copies.get((index, name), 0) + 1
            (self.parted.discard if is_after_known else self.parted.add)((index, name))

    def _keeps(self, group: Group, at: int, num_tokens: int, last: int) -> bool:
        if group.is_full:
            return True
        if group.kind == "mamba":
            return at == last
        needed, shift = group.num_needed(self.eagle), int(self.eagle)
        per_step = self.step // group.block_size
        if self.is_dense:
            return needed >= per_step or (at >= shift and (at - shift) % per_step >= per_step - needed)
        ends = {num_tokens - 1}
        if self.eagle:
            ends = {max(num // self.step * self.step - self.step, 0) for num in (num_tokens - 1, num_tokens)}
        stops = [end // self.step * self.step // group.block_size + shift for end in ends]
        return any(stop - needed <= at < stop for stop in stops)

    def _say_stored(self, index: int, prompt: Prompt, begin: int, end: int, names: Sequence[int]) -> None:
        group = self.groups[index]
        (salt, tokens), size = prompt, group.block_size
        parent = self.names(prompt, size)[begin // size - 1] if begin else None
        first = self.names(prompt, size)[0]
        for name in names:
            self.possible[index, name] = self.possible.get((index, name), 0) + 1
        self.events.append(
            BlockStored(
                tuple(names),
                parent,
                tokens[begin:end],
                size,
                medium="GPU",
                extra_keys=tuple((salt.hex(),) if name == first else None for name in names),
                group_idx=index,
                kv_cache_spec_kind=group.kind,
                kv_cache_spec_sliding_window=group.length if group.kind.startswith("sliding_window") else None,
            )
        )

    def evict(self, block: tuple[int, int]) -> None:
        num_left = self.copies[block] - 1
        if not (num_left and self.counts_copies):
            self.known.discard(block)
        if num_left:
            self.copies[block] = num_left
            if not self.counts_copies:
                self.parted.add(block)
        else:
            del self.copies[block]
            self.parted.discard(block)
        self.possible[block] = num_left if self.counts_copies else self.possible[block] - 1
        if not self.possible[block]:
            del self.possible[block]
        counts = (num_left,) if self.counts_copies else None
        self.events.append(BlockRemoved((block[1],), "GPU", block[0], counts))

    def reset(self) -> None:
        self.copies, self.parted, self.known, self.possible = {}, set(), set(), {}
        self.has_doubtful_events = self.has_gap = False
        self.events.append(AllBlocksCleared())

    def lose_events(self) -> None:
        """Lose all events since the last ones taken, and with them the known blocks."""
        self.events, self.known, self.has_gap = [], set(), True

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events
