"""Forks share every block and copy one at its first divergent write, whatever the allocator."""

from __future__ import annotations

import pytest

from cache.allocators import PrefixCache, make_allocator
from cache.allocators.base import Allocation, Allocator, BlockCopy
from cache.allocators.hash import HashAllocator
from cache.hashing import Namespace, hash_chain

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


def test_blocks_that_are_to_be_copied_are_not_reserved() -> None:
    """The fork yields in the step that copies for it: a fetch would write into both blocks before the copy."""
    allocator = HashAllocator(5, 4)
    first = prefill(allocator, 6)
    second = first.fork()
    assert first.extend(7)
    chain = hash_chain(ROOT, range(100, 108), 4)
    held = allocator.reserve(ROOT, chain[:1])
    assert held is not None, "no owed copy concerns a free block"
    held.free()
    second.free()
    assert allocator.num_free_blocks == len(chain)
    assert allocator.reserve(ROOT, chain) is None
    assert allocator.take_copies()
    assert allocator.reserve(ROOT, chain) is not None
