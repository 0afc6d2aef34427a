"""The plain allocator: TGI's documented ids, and the ring of a sliding window."""

from __future__ import annotations

import sys

import pytest

from cache.allocators.base import Allocation, BlockCopy
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


def test_nothing_is_found() -> None:
    allocator = PlainAllocator(12, 1)
    allocation = allocate(allocator, 8)
    allocation.commit(range(8), 8)
    allocation.free()
    assert allocator.find(range(8), ROOT) == 0
    assert allocate(allocator, 8).num_cached_tokens == 0
    assert allocator.take_events() == []
    assert list(allocator.cached_hashes()) == []
    stats = allocator.stats()
    assert (stats.hit_tokens, stats.num_cached_blocks) == (0, 0)


def test_failed_allocation_changes_nothing_in_a_plain_pool() -> None:
    allocator = PlainAllocator(5, 2)
    allocation = allocate(allocator, 3)
    assert allocator.allocate(5, range(5), ROOT) is None
    assert not allocation.extend(9)
    assert allocation.block_table == [3, 4]
    assert allocation.extend(8)
    assert allocation.block_table == [3, 4, 1, 2]


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


def test_fork_copies_window_blocks_before_it_overwrites_them() -> None:
    allocator = PlainAllocator(12, 2, window_size=6)
    first = allocate(allocator, 7)
    first.commit(range(7), 7)
    second = first.fork()
    assert second.extend(8)  # token 7 goes into the first block, which also holds token 6
    assert second.block_table == [8, 10, 11]
    assert allocator.take_copies() == [BlockCopy(9, 8)]  # type: ignore[arg-type]
    second.commit(range(8), 8)
    assert second.extend(40)
    assert set(second.block_table).isdisjoint(first.block_table)
    assert [copy.source for copy in allocator.take_copies()] == [10, 11]
    allocator.check_integrity()
    first.free()
    second.free()
    allocator.check_integrity()
    assert allocator.num_free_blocks == 11


def test_a_bad_window_is_named() -> None:
    with pytest.raises(ValueError, match="window_size"):
        PlainAllocator(12, 2, window_size=0)


def test_fork_wrapping_a_partial_window_copies_its_start() -> None:
    allocator = PlainAllocator(12, 2, window_size=6)
    first = allocate(allocator, 3)
    first.commit(range(3), 3)
    second = first.fork()
    assert second.extend(7)  # tokens 3 to 6: token 6 goes into the first block again
    assert len(second.block_table) == 3
    assert set(second.block_table).isdisjoint(first.block_table)
    assert [copy.source for copy in allocator.take_copies()] == list(first.block_table)
