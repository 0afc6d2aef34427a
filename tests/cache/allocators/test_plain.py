"""The plain allocator: TGI's documented ids, and the ring of a sliding window."""

from __future__ import annotations

import sys

import pytest

from cache.allocators.base import Allocation
from cache.allocators.plain import PlainAllocator
from cache.hashing import Namespace

ROOT = Namespace("model", "main", "tokenizer", 2).root(salt=b"")


def allocate(allocator: PlainAllocator, num_tokens: int) -> Allocation:
    allocation = allocator.allocate(num_tokens, range(num_tokens), ROOT)
    assert allocation is not None
    return allocation


def test_blocks_come_from_the_end_and_go_back_to_it() -> None:
    allocator = PlainAllocator(12, 1)
    allocation = allocate(allocator, 8)
    assert allocation.block_table == [4, 5, 6, 7, 8, 9, 10, 11]
    other = allocate(allocator, 2)
    assert other.block_table == [2, 3]
    allocation.free()
    other.free()
    assert allocate(allocator, 5).block_table == [9, 10, 11, 2, 3]


def test_slots_repeat_over_the_blocks_of_the_window() -> None:
    allocator = PlainAllocator(12, 2, window_size=6)
    allocation = allocate(allocator, 15)
    assert allocation.block_table == [9, 10, 11]
    assert allocation.slots(0, 15) == [18, 19, 20, 21, 22, 23, 18, 19, 20, 21, 22, 23, 18, 19, 20]
    assert allocation.capacity == sys.maxsize
    assert allocation.extend(1000)
    assert allocation.block_table == [9, 10, 11]
    assert allocation.slots(999, 1000) == [21]


def test_below_the_window_blocks_are_added() -> None:
    allocator = PlainAllocator(12, 2, window_size=5)
    allocation = allocate(allocator, 1)
    assert allocation.capacity == 2
    assert allocation.extend(4)
    assert allocation.capacity == 4
    assert allocation.extend(40)
    assert allocation.block_table == [11, 10, 9]
    assert allocator.num_free_blocks == 8


def test_a_bad_window_is_named() -> None:
    assert PlainAllocator(12, 2, window_size=1).num_blocks_for(9) == 1
    with pytest.raises(ValueError, match="window_size"):
        PlainAllocator(12, 2, window_size=0)
