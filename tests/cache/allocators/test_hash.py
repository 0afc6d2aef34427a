"""The hash allocator: vLLM v1's documented orders, and when blocks become findable."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.allocators.base import Allocation
from cache.allocators.hash import HashAllocator
from cache.events import Removed, Stored
from cache.hashing import Namespace, hash_chain
from tests.cache.held import cached_hashes

ROOT = Namespace("model", "main", "tokenizer", 16).root(salt=b"tenant")


def allocate(allocator: HashAllocator, token_ids: Sequence[int], num_tokens: int | None = None) -> Allocation:
    allocation = allocator.allocate(num_tokens or len(token_ids), token_ids, ROOT)
    assert allocation is not None
    return allocation


def compute(allocator: HashAllocator, token_ids: Sequence[int]) -> Allocation:
    allocation = allocate(allocator, token_ids)
    allocation.commit(token_ids, len(token_ids))
    return allocation


def free_order(allocator: HashAllocator) -> list[int]:
    """Return the next victims, first to last."""
    probe = allocate(allocator, [0], num_tokens=allocator.num_free_blocks * allocator.block_size)
    return list(probe.block_table)


def test_reference_order_of_vllm_v1() -> None:
    allocator = HashAllocator(11, 16)
    common = list(range(48))
    first = compute(allocator, [*common, *range(100, 107)])
    assert first.block_table == [1, 2, 3, 4]
    second = compute(allocator, [*common, *range(200, 205)])
    assert second.block_table == [1, 2, 3, 5]
    assert second.num_cached_tokens == 48
    first.free()
    second.free()
    assert free_order(allocator) == [6, 7, 8, 9, 10, 4, 5, 3, 2, 1]


def test_events_of_copies() -> None:
    """Stored comes with the first copy, Removed with the last."""
    allocator = HashAllocator(6, 4)
    chain = hash_chain(ROOT, range(4), 4)
    first, second = allocate(allocator, range(5)), allocate(allocator, range(5))
    first.commit(range(5), 5)
    second.commit(range(5), 5)
    assert allocator.take_events() == [Stored(chain[0])]
    assert first.block_table == [1, 2]
    assert second.block_table == [3, 4]
    first.free()
    second.free()  # the queue is 5 2 1 4 3
    taker = allocate(allocator, [9], num_tokens=16)
    assert taker.block_table == [5, 2, 1, 4]
    assert allocator.take_events() == []
    assert allocator.find(range(5), ROOT) == 4
    assert taker.extend(20)
    assert allocator.take_events() == [Removed(chain[0])]
    assert allocator.find(range(5), ROOT) == 0


def test_hashes_may_be_given() -> None:
    allocator = HashAllocator(11, 4)
    hashes = hash_chain(ROOT, range(9), 4)
    allocation = allocator.allocate(9, range(9), ROOT, hashes=hashes)
    assert allocation is not None
    assert allocation.extend(12)
    allocation.commit(range(12), 12)
    assert len(hashes) == 2, "the caller's list grew"
    assert cached_hashes(allocator) == hash_chain(ROOT, range(12), 4)
    assert allocator.find(range(9), ROOT, hashes=hashes) == 8


def test_slots() -> None:
    allocator = HashAllocator(11, 4)
    allocate(allocator, range(4))
    allocation = allocate(allocator, range(9))
    assert allocation.block_table == [2, 3, 4]
    assert allocation.slots(0, 3) == [8, 9, 10]
    assert allocation.slots(2, 9) == [10, 11, 12, 13, 14, 15, 16]
    assert allocation.slots(8, 8) == []
    with pytest.raises(AssertionError):
        allocation.slots(8, 13)


def test_statistics() -> None:
    allocator = HashAllocator(4, 4)
    compute(allocator, range(9)).free()
    assert allocator.stats().next_victim_age == 0
    compute(allocator, range(9)).free()
    compute(allocator, range(50, 55)).free()
    stats = allocator.stats()
    assert stats.hit_tokens == 8
    assert (stats.num_blocks, stats.num_free_blocks, stats.num_cached_blocks) == (4, 3, 2)
    assert stats.evictions == 1
    assert stats.next_victim_age == 1


def test_eviction_is_lru_and_tail_first_within_a_chain() -> None:
    """The order of Aphrodite's LRUEvictor."""
    allocator = HashAllocator(6, 4)
    older, newer = compute(allocator, range(8)), compute(allocator, range(50, 62))
    older.free()
    newer.free()
    older_chain, newer_chain = hash_chain(ROOT, range(8), 4), hash_chain(ROOT, range(50, 62), 4)
    allocator.take_events()
    allocate(allocator, [9], num_tokens=20)
    assert allocator.take_events() == [Removed(h) for h in [*reversed(older_chain), *reversed(newer_chain)]]


def test_hit_makes_a_chain_the_last_victim() -> None:
    allocator = HashAllocator(5, 4)
    compute(allocator, range(8)).free()
    compute(allocator, range(50, 58)).free()
    allocate(allocator, range(8)).free()
    allocate(allocator, [9], num_tokens=8)
    assert allocator.find(range(8), ROOT) == 4
    assert allocator.find(range(50, 58), ROOT) == 0


def test_a_chain_that_is_too_long_leaves_the_room_to_others() -> None:
    allocator = HashAllocator(65, 4)
    for length, first in ((3, 100), (20, 200)):  # the longest was used last
        compute(allocator, range(first, first + 4 * length)).free()
    assert [len(each) for each in allocator.recent_chains(100)] == [20, 3]
    assert [len(each) for each in allocator.recent_chains(10)] == [3]
    held = compute(allocator, range(100, 108))  # a chain that is in use comes first
    assert [len(each) for each in allocator.recent_chains(23)] == [20, 3]
    compute(allocator, range(400, 408))
    assert [len(each) for each in allocator.recent_chains(22)] == [2, 20]
    held.free()


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=12),
    max_blocks=st.integers(0, 40),
)
def test_recent_chains_are_whole_and_bounded(prompts: list[list[int]], max_blocks: int) -> None:
    allocator = HashAllocator(21, 4)
    for numbers in prompts:
        compute(allocator, [n for n in numbers for _ in range(4)]).free()
    chains = allocator.recent_chains(max_blocks)
    for links in chains:
        assert [link.depth for link in links] == list(range(len(links)))
        assert [link.parent for link in links] == [ROOT, *(link.block_hash for link in links[:-1])]
    tips = [links[-1].block_hash for links in chains]
    assert len({*tips} - {link.parent for links in chains for link in links}) == len(tips)
    assert len({link for links in chains for link in links}) <= max_blocks
    if max_blocks >= 20:
        assert {link.block_hash for links in chains for link in links} == set(cached_hashes(allocator))
