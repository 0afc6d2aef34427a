"""Every allocator against a simulated KV memory: random sequences, forks, failing steps, evictions and resets.

A slot of the memory holds the inputs of a real KV entry: the tenant and all tokens up to its own. A block that is found
under a wrong prefix, written while shared, or taken while held is a wrong entry. The vocabulary has two
tokens, so prefixes collide. The pool is small, so nearly everything is evicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cache.allocators import PrefixCache, make_allocator
from cache.allocators.base import Allocation, Allocator
from cache.allocators.hash import HashAllocator
from cache.events import Removed, Stored
from cache.hashing import Namespace, hash_chain
from cache.types import BlockHash
from tests.block_events import replay
from tests.cache.held import cached_hashes

TENANTS = tuple(Namespace("model", "main", "tokenizer", 1).root(salt=salt) for salt in (b"a", b"b"))
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=6)
PROBABLY = st.sampled_from((True, True, True, False))
TENANT = st.sampled_from((TENANTS[0], TENANTS[0], TENANTS[0], TENANTS[1]))
DEEP_STEPS = 200_000

KV = tuple[BlockHash, tuple[int, ...]]
"""The inputs of a KV entry."""


@dataclass(eq=False)
class Sequence:
    tenant: BlockHash
    tokens: list[int]
    allocation: Allocation
    num_computed: int
    is_forked: bool = False
    """It must call `extend` before it writes, even into room that it has."""


class AllocatorMachine(RuleBasedStateMachine):
    kind: ClassVar[PrefixCache]
    window_size: ClassVar[int | None] = None
    steps: ClassVar[list[int]]

    allocator: Allocator

    @initialize(num_blocks=st.sampled_from((10, 14, 20, 6, 2)), block_size=st.sampled_from((2, 3, 1, 4)))
    def begin(self, num_blocks: int, block_size: int) -> None:
        self.allocator = make_allocator(self.kind, num_blocks, block_size, self.window_size)
        self.prompts: list[list[int]] = []
        self.memory: dict[int, KV | None] = {}
        self.running: list[Sequence] = []
        self.published: set[BlockHash] = set()
        self.parents: dict[BlockHash, BlockHash] = {}
        self.written: set[BlockHash] = set()

    @rule(data=st.data(), tenant=TENANT, reuse=PROBABLY, hashed=st.booleans())
    def start(self, data: st.DataObject, tenant: BlockHash, reuse: bool, hashed: bool) -> None:
        """Admit a request; with too many at once, preempt the first one."""
        if len(self.running) >= 4:
            self.finish(self.running[0])
        self.admit(data, tenant, reuse, hashed)

    @rule(data=st.data(), tenant=TENANT)
    def serve(self, data: st.DataObject, tenant: BlockHash) -> None:
        """Serve a whole request, while the others wait."""
        sequence = self.admit(data, tenant, True, False)
        if sequence is None:
            return
        stop = min(len(sequence.tokens), sequence.allocation.capacity)
        self.write(sequence, stop)
        self.commit(sequence, stop)
        self.finish(sequence)

    def admit(self, data: st.DataObject, tenant: BlockHash, reuse: bool, hashed: bool) -> Sequence | None:
        allocator, size = self.allocator, self.allocator.block_size
        tokens = self.draw_prompt(data)
        num_tokens = data.draw(st.sampled_from((len(tokens), len(tokens) + 4, 1)))
        hashes = hash_chain(tenant, tokens, size) if hashed else None
        found = allocator.find(tokens, tenant, hashes=hashes) if reuse else 0
        self.check_found(tenant, tokens, allocator.find(tokens, tenant))
        before = self.snapshot()
        num_free = allocator.num_free_blocks
        num_needed = max(found // size, self.table_length(num_tokens))
        allocation = allocator.allocate(num_tokens, tokens, tenant, reuse=reuse, hashes=hashes)
        if allocation is None:
            assert num_needed > num_free, f"{num_needed} blocks fit into {num_free}"
            assert self.snapshot() == before, "a failed allocation changed something"
            return None
        assert num_needed - found // size <= num_free
        assert allocation.num_cached_tokens == found < len(tokens)
        assert len(allocation.block_table) == num_needed
        assert allocation.capacity >= num_tokens
        sequence = Sequence(tenant, tokens, allocation, found)
        self.running.append(sequence)
        return sequence

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        if len(self.running) > 6:
            return
        num_free = self.allocator.num_free_blocks
        fork = sequence.allocation.fork()
        assert self.allocator.num_free_blocks == num_free, "a fork took a block"
        assert fork.block_table == sequence.allocation.block_table
        assert fork.num_cached_tokens == sequence.allocation.num_cached_tokens
        tokens = sequence.tokens[: max(1, sequence.num_computed)] + data.draw(st.lists(st.integers(0, 1), max_size=3))
        sequence.is_forked = True
        self.running.append(Sequence(sequence.tenant, tokens, fork, sequence.num_computed, True))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), fails=st.sampled_from((False, False, False, False, False, True)))
    def step(self, data: st.DataObject, fails: bool) -> None:
        """Let some sequences compute a chunk of their prompt or a token; a failed step aborts all of them."""
        batch = [self.schedule(data, sequence) for sequence in self.running if data.draw(PROBABLY)]
        scheduled = [(sequence, stop) for sequence, stop in filter(None, batch)]
        for copy in self.allocator.take_copies():
            self.copy_block(copy.source, copy.destination)
        for sequence, stop in scheduled:
            written = data.draw(st.integers(sequence.num_computed, stop)) if fails else stop
            self.write(sequence, written)
        for sequence, stop in scheduled:
            if fails:
                self.finish(sequence)
                continue
            self.commit(sequence, stop)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        """Finish or preempt a sequence, or lose its client: the allocator sees no difference."""
        self.finish(data.draw(st.sampled_from(self.running)))

    @rule()
    def reset(self) -> None:
        assert self.allocator.reset() == (not self.running)
        if not self.running:
            self.published.clear()

    @invariant()
    def everything_holds(self) -> None:
        if not hasattr(self, "allocator"):
            return
        self.steps[0] += 1
        allocator = self.allocator
        allocator.check_integrity()
        tables = [sequence.allocation.block_table for sequence in self.running]
        in_use = {block_id for table in tables for block_id in table}
        assert 0 not in in_use
        assert in_use <= set(range(allocator.num_blocks))
        num_free = allocator.num_free_blocks
        assert num_free + len(in_use) == allocator.num_blocks - 1, "a sequence holds blocks beyond its table"
        self.replay_events()
        held = cached_hashes(allocator)
        assert len(held) == len(set(held)) == allocator.stats().num_cached_blocks
        assert self.published == set(held), "the events do not rebuild the map"
        assert self.published <= self.written, "findable, but not written"
        position = {block_hash: place for place, block_hash in enumerate(held)}
        for block_hash in held:
            parent = self.parents[block_hash]
            assert parent in TENANTS or position[parent] < position[block_hash], "not prefix-closed"
        for sequence in self.running:
            self.check_memory(sequence)

    def teardown(self) -> None:
        if not hasattr(self, "allocator"):
            return
        for sequence in list(self.running):
            self.finish(sequence)
        self.allocator.check_integrity()
        assert self.allocator.num_free_blocks == self.allocator.num_blocks - 1
        assert self.allocator.reset()
        assert cached_hashes(self.allocator) == []

    def draw_prompt(self, data: st.DataObject) -> list[int]:
        """Draw a new prompt, or the next turn of an earlier one."""
        before = data.draw(st.sampled_from([[], *self.prompts[-8:]]))
        tokens = [*before[: data.draw(st.sampled_from((12, 11, 7, 4)))], *data.draw(TOKENS)]
        self.prompts.append(tokens)
        return tokens

    def schedule(self, data: st.DataObject, sequence: Sequence) -> tuple[Sequence, int] | None:
        """Make room for the next tokens of a sequence; return where they end, or None: it does not fit."""
        allocation, size = sequence.allocation, self.allocator.block_size
        if sequence.num_computed == len(sequence.tokens):
            sequence.tokens.append(data.draw(st.integers(0, 1)))
        stop = max(sequence.num_computed + 1, len(sequence.tokens) - data.draw(st.sampled_from((0, 0, 0, 1, 3, 6))))
        if stop <= allocation.capacity and not sequence.is_forked and data.draw(st.booleans()):
            return sequence, stop
        before = self.snapshot()
        table = list(allocation.block_table)
        shared = [place for place, block_id in enumerate(table) if self.num_holders(block_id) > 1]
        num_free = self.allocator.num_free_blocks
        if not allocation.extend(stop):
            assert self.snapshot() == before, "a failed extend changed something"
            assert self.table_length(stop) - len(table) + len(shared) > num_free
            return None
        kept = sequence.num_computed // size if self.window_size is None else 0
        assert list(allocation.block_table[:kept]) == table[:kept], "a block that is not written was replaced"
        replaced = [place for place, block_id in enumerate(table) if allocation.block_table[place] != block_id]
        assert set(replaced) <= set(shared), "a block that nobody shares was replaced"
        assert allocation.capacity >= stop
        for slot in allocation.slots(sequence.num_computed, stop):
            assert self.num_holders(slot // size) == 1, "a shared block would be written"
        return sequence, stop

    def write(self, sequence: Sequence, stop: int) -> None:
        start = sequence.num_computed
        for position, slot in zip(range(start, stop), sequence.allocation.slots(start, stop), strict=True):
            self.memory[slot] = (sequence.tenant, tuple(sequence.tokens[: position + 1]))

    def copy_block(self, source: int, destination: int) -> None:
        for offset in range(size := self.allocator.block_size):
            self.memory[destination * size + offset] = self.memory.get(source * size + offset)

    def finish(self, sequence: Sequence) -> None:
        sequence.allocation.free()
        self.running.remove(sequence)
        with pytest.raises(AssertionError):
            sequence.allocation.free()

    def commit(self, sequence: Sequence, stop: int) -> None:
        table = list(sequence.allocation.block_table)
        sequence.allocation.commit(sequence.tokens, stop)
        assert self.kind == "radix" or sequence.allocation.block_table == table, "a commit changed a table"
        sequence.num_computed = stop
        chain = hash_chain(sequence.tenant, sequence.tokens[:stop], self.allocator.block_size)
        findable = set(cached_hashes(self.allocator))
        assert findable.issuperset(chain) if self.kind != "off" else not findable, "a commit makes full blocks findable"
        self.parents.update(zip(chain, [sequence.tenant, *chain], strict=False))
        self.written.update(chain)

    def replay_events(self) -> None:
        for event in self.allocator.take_events():
            match event:
                case Stored(block_hash):
                    assert block_hash not in self.published, "stored with a copy that is not the first"
                case Removed(block_hash):
                    assert block_hash in self.published, "removed twice, or never stored"
            replay([event], self.published)

    def check_memory(self, sequence: Sequence) -> None:
        first = 0 if self.window_size is None else max(0, sequence.num_computed - self.window_size)
        slots = sequence.allocation.slots(first, sequence.num_computed)
        for position, slot in zip(range(first, sequence.num_computed), slots, strict=True):
            entry = self.memory.get(slot)
            assert entry == (sequence.tenant, tuple(sequence.tokens[: position + 1])), f"position {position}: {entry}"

    def check_found(self, tenant: BlockHash, tokens: list[int], found: int) -> None:
        """Check that published implies findable, but for the last token."""
        size = self.allocator.block_size
        chain = hash_chain(tenant, tokens[:-1], size)
        missing = [place for place, block_hash in enumerate(chain) if block_hash not in self.published]
        assert found == size * (missing[0] if missing else len(chain))

    def table_length(self, num_tokens: int) -> int:
        size = self.allocator.block_size
        most = num_tokens if self.window_size is None else min(num_tokens, self.window_size)
        return -(-most // size)

    def num_holders(self, block_id: int) -> int:
        return sum(block_id in sequence.allocation.block_table for sequence in self.running)

    def snapshot(self) -> object:
        """Return everything that a failure may not change, with the order of eviction where it can be read."""
        allocator = self.allocator
        order: list[int] = []
        if isinstance(allocator, HashAllocator):
            order = list(allocator._free)
        tables = [list(sequence.allocation.block_table) for sequence in self.running]
        return allocator.stats(), cached_hashes(allocator), tables, order


class HashMachine(AllocatorMachine):
    kind = "hash"
    steps: ClassVar = [0]


class RadixMachine(AllocatorMachine):
    kind = "radix"
    steps: ClassVar = [0]


class OffMachine(AllocatorMachine):
    kind = "off"
    steps: ClassVar = [0]


class WindowMachine(AllocatorMachine):
    kind = "off"
    window_size = 5
    steps: ClassVar = [0]


MACHINES = pytest.mark.parametrize("machine", [HashMachine, RadixMachine, OffMachine, WindowMachine])


def profile(max_examples: int, step_count: int) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=step_count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@MACHINES
def test_short_run(machine: type[AllocatorMachine]) -> None:
    run_state_machine_as_test(machine, settings=profile(60, 60))


@pytest.mark.deep
@MACHINES
def test_deep_run(machine: type[AllocatorMachine]) -> None:
    machine.steps[0] = 0
    while machine.steps[0] < DEEP_STEPS:
        run_state_machine_as_test(machine, settings=profile(250, 200))
    print(f"{machine.__name__}: {machine.steps[0]:,} steps")
