"""Forks share every block and copy one at its first divergent write, whatever the allocator."""

from __future__ import annotations

import pytest

from cache.allocators import PrefixCache, make_allocator
from cache.allocators.base import Allocation, Allocator, BlockCopy
from cache.hashing import Namespace

ROOT = Namespace("model", "main", "tokenizer", 4).root(salt=b"tenant")
KINDS = pytest.mark.parametrize("kind", ["hash", "radix", "off"])


def prefill(allocator: Allocator, num_tokens: int) -> Allocation:
    allocation = allocator.allocate(num_tokens, range(num_tokens), ROOT)
    assert allocation is not None
    allocation.commit(range(num_tokens), num_tokens)
    return allocation


def tables(*allocations: Allocation) -> list[list[int]]:
    return [list(allocation.block_table) for allocation in allocations]


@KINDS
def test_four_choices_take_the_prompt_once(kind: PrefixCache) -> None:
    allocator = make_allocator(kind, 300, 16)
    first = prefill(allocator, 2000)
    choices = [first, *(first.fork() for _ in range(3))]
    assert allocator.num_free_blocks == 299 - 125
    assert tables(*choices) == [list(first.block_table)] * 4
    assert allocator.take_copies() == []
    for choice in choices:  # 2,000 tokens fill their blocks: the first write goes into a new block
        assert choice.extend(2001)
    assert allocator.take_copies() == []
    assert allocator.num_free_blocks == 299 - 125 - 4
    allocator.check_integrity()
    for choice in choices:
        choice.free()
    assert allocator.num_free_blocks == 299
    allocator.check_integrity()


@KINDS
def test_the_first_write_into_a_shared_block_copies_it(kind: PrefixCache) -> None:
    allocator = make_allocator(kind, 12, 4)
    first = prefill(allocator, 6)
    second, third = first.fork(), first.fork()
    full, partial = first.block_table
    assert second.extend(7)
    assert third.extend(7)
    assert first.extend(7), "the last holder writes in place"
    assert tables(first) == [[full, partial]]
    assert second.block_table[0] == third.block_table[0] == full
    assert len({partial, second.block_table[1], third.block_table[1]}) == 3
    assert allocator.take_copies() == [
        BlockCopy(partial, second.block_table[1]),
        BlockCopy(partial, third.block_table[1]),
    ]
    assert allocator.take_copies() == []
    allocator.check_integrity()


@KINDS
def test_unwritten_room_is_replaced_without_a_copy(kind: PrefixCache) -> None:
    allocator = make_allocator(kind, 12, 4)
    allocation = allocator.allocate(12, range(4), ROOT)
    assert allocation is not None
    allocation.commit(range(4), 4)
    fork = allocation.fork()
    assert fork.extend(9)
    assert allocator.take_copies() == []
    assert fork.block_table[0] == allocation.block_table[0]
    assert set(fork.block_table[1:]).isdisjoint(allocation.block_table[1:])
    allocator.check_integrity()


@KINDS
def test_a_copy_that_does_not_fit_changes_nothing(kind: PrefixCache) -> None:
    allocator = make_allocator(kind, 4, 4)
    first = prefill(allocator, 6)
    second = first.fork()
    before = tables(second)
    assert not second.extend(13)  # one block to copy and two more: one is there
    assert tables(second) == before
    assert allocator.take_copies() == []
    allocator.check_integrity()
    assert second.extend(8)
    assert allocator.num_free_blocks == 0


@KINDS
def test_a_chain_of_copies_keeps_its_order(kind: PrefixCache) -> None:
    allocator = make_allocator(kind, 4, 4)
    first = prefill(allocator, 2)
    second = first.fork()
    assert second.extend(3)
    third = second.fork()
    first.free()
    assert third.extend(3)
    one, two = allocator.take_copies()
    assert (one.destination, two.source) == (second.block_table[0], second.block_table[0])
    assert two.destination == third.block_table[0]


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_forks_commit_shared_blocks_once_and_own_blocks_each(kind: PrefixCache) -> None:
    allocator = make_allocator(kind, 20, 4)
    first = prefill(allocator, 6)
    second = first.fork()
    assert first.extend(8)
    assert second.extend(8)
    first.commit([0, 1, 2, 3, 4, 5, 60, 70], 8)
    second.commit([0, 1, 2, 3, 4, 5, 61, 71], 8)
    assert len(allocator.take_events()) == 3
    assert allocator.find([0, 1, 2, 3, 4, 5, 60, 70, 0], ROOT) == 8
    assert allocator.find([0, 1, 2, 3, 4, 5, 61, 71, 0], ROOT) == 8
    assert second.num_cached_tokens == 0
    first.free()
    allocator.check_integrity()
    assert allocator.find([0, 1, 2, 3, 4, 5, 61, 71, 0], ROOT) == 8


@KINDS
def test_a_fork_outlives_its_origin(kind: PrefixCache) -> None:
    allocator = make_allocator(kind, 20, 4)
    first = prefill(allocator, 6)
    fork = first.fork()
    first.free()
    allocator.check_integrity()
    assert allocator.num_free_blocks == 17
    assert fork.extend(7), "alone again: nothing to copy"
    assert allocator.take_copies() == []
    fork.free()
    assert allocator.num_free_blocks == 19
