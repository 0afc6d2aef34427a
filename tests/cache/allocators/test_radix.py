"""The radix allocator: TGI's documented ids, when blocks become findable, and whole blocks.

TGI inserts a prompt when its request ends and finds all of it again. Ours inserts blocks at their commit and always
leaves one token of the prompt to compute. So the tests from TGI give prompts one more token, which is never computed,
and commit right before they free. The ids are TGI's.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cache.allocators.base import Allocation
from cache.allocators.radix import RadixAllocator
from cache.events import Removed, Stored
from cache.hashing import Namespace, hash_chain
from tests.block_events import replay
from tests.cache.held import cached_hashes

ROOT = Namespace("model", "main", "tokenizer", 1).root(salt=b"tenant")
MORE = 99


def allocate(allocator: RadixAllocator, num_tokens: int, prompt: Sequence[int], *, reuse: bool = True) -> Allocation:
    allocation = allocator.allocate(num_tokens, [*prompt, MORE], ROOT, reuse=reuse)
    assert allocation is not None
    return allocation


def finish(allocation: Allocation, prompt: Sequence[int]) -> None:
    allocation.commit(prompt, len(prompt))
    allocation.free()


def num_unused(allocator: RadixAllocator) -> int:
    """Count blocks that are neither held nor findable."""
    return allocator.num_free_blocks - allocator.trie.num_evictable


def test_prefix_is_reused() -> None:
    allocator = RadixAllocator(12, 1)
    allocation = allocate(allocator, 8, [0, 1, 2, 3])
    assert allocation.block_table == [4, 5, 6, 7, 8, 9, 10, 11]
    assert allocation.slots(0, 8) == allocation.block_table
    assert allocation.num_cached_tokens == 0
    finish(allocation, [0, 1, 2, 3])
    allocation = allocate(allocator, 8, [0, 1, 2, 3])
    assert allocation.block_table == [4, 5, 6, 7, 8, 9, 10, 11]
    assert allocation.num_cached_tokens == 4


def test_older_prefixes_are_evicted_first() -> None:
    allocator = RadixAllocator(7, 1)
    first = allocate(allocator, 4, [0, 1, 2, 3])
    assert first.block_table == [3, 4, 5, 6]
    second = allocate(allocator, 2, [4, 5])
    assert second.block_table == [1, 2]
    finish(first, [0, 1, 2, 3])
    finish(second, [4, 5])
    third = allocate(allocator, 4, [6, 7, 8, 9])
    assert third.block_table == [3, 4, 5, 6]
    assert third.num_cached_tokens == 0


def test_partially_overlapping_prompts_are_freed() -> None:
    allocator = RadixAllocator(20, 1)
    first = allocate(allocator, 4, [0, 1])
    assert first.block_table == [16, 17, 18, 19]
    finish(first, [0, 1])
    second = allocate(allocator, 8, [0, 1, 2, 3, 4, 5])
    assert second.block_table == [16, 17, 12, 13, 14, 15, 18, 19]
    assert second.num_cached_tokens == 2
    third = allocate(allocator, 8, [0, 1, 2, 3, 6, 7])
    assert third.block_table == [16, 17, 6, 7, 8, 9, 10, 11]
    assert third.num_cached_tokens == 2
    finish(third, [0, 1, 2, 3, 6, 7])
    finish(second, [0, 1, 2, 3, 4, 5])
    assert num_unused(allocator) == 11
    fourth = allocate(allocator, 6, [0, 1, 2, 3, 4, 5])
    assert fourth.block_table == [16, 17, 6, 7, 14, 15]
    assert fourth.num_cached_tokens == 6
    assert num_unused(allocator) == 11
    fifth = allocate(allocator, 6, [0, 1, 2, 3, 6, 7])
    assert fifth.block_table == [16, 17, 6, 7, 8, 9]
    assert fifth.num_cached_tokens == 6
    assert num_unused(allocator) == 11
    allocator.check_integrity()


def test_generated_tokens_extend_one_node() -> None:
    allocator = RadixAllocator(20, 1)
    tokens = [0, 1]
    allocation = allocate(allocator, 3, tokens)
    for token in range(2, 12):
        allocation.commit(tokens, len(tokens))
        tokens.append(token)
        assert allocation.extend(len(tokens))
    assert len(list(allocator.trie.nodes())) == 2
    assert allocator.find(tokens, ROOT) == 11
    assert allocator.trie.time == 11, "the allocation and each commit count as a use"
    allocator.check_integrity()


@pytest.mark.parametrize("length", [0, 1, 4, 5, 8, 9, 12, 13])
def test_whole_blocks_only_when_a_block_has_more_than_one_token(length: int) -> None:
    allocator = RadixAllocator(20, 4)
    allocation = allocator.allocate(10, range(10), ROOT)
    assert allocation is not None
    assert allocation.block_table == [17, 18, 19]
    assert allocation.slots(3, 9) == [71, 72, 73, 74, 75, 76]
    allocation.commit(range(10), 10)
    assert cached_hashes(allocator) == hash_chain(ROOT, range(10), 4)
    assert allocator.find(range(length), ROOT) == min(8, max(0, length - 1) // 4 * 4)


def test_events_are_of_blocks_and_tail_first() -> None:
    allocator = RadixAllocator(5, 2)
    chain = hash_chain(ROOT, range(6), 2)
    allocation = allocator.allocate(6, range(6), ROOT)
    assert allocation is not None
    finish(allocation, range(6))
    events = allocator.take_events()
    assert events == [Stored(block_hash) for block_hash in chain]
    assert allocator.allocate(6, [9], ROOT) is not None
    more = allocator.take_events()
    assert more == [Removed(chain[2]), Removed(chain[1])]
    assert replay([*events, *more]) == set(cached_hashes(allocator)) == {chain[0]}


def test_statistics() -> None:
    allocator = RadixAllocator(6, 1)
    assert allocator.stats().next_victim_age == 0
    finish(allocate(allocator, 4, [0, 1, 2]), [0, 1, 2])
    finish(allocate(allocator, 4, [0, 1, 2]), [0, 1, 2])
    finish(allocate(allocator, 5, [7]), [7])
    stats = allocator.stats()
    assert (stats.hit_tokens, stats.evictions) == (3, 3)
    assert (stats.num_free_blocks, stats.num_cached_blocks) == (5, 1)
    before = allocator.trie.time
    finish(allocate(allocator, 2, [8]), [8])
    later = allocator.stats()
    assert later.next_victim_age - stats.next_victim_age == allocator.trie.time - before > 0


def test_a_later_sequence_takes_over_the_first_blocks() -> None:
    """It frees its own duplicates."""
    allocator = RadixAllocator(14, 1)
    tokens = [0, 1, 2, 3]
    first, second = allocate(allocator, 5, tokens), allocate(allocator, 5, tokens)
    first.commit(tokens, 4)
    kept = second.block_table[4]
    assert allocator.num_free_blocks == 3
    second.commit(tokens, 4)
    assert second.block_table == [*first.block_table[:4], kept]
    assert allocator.num_free_blocks == 7
    allocator.check_integrity()
    first.free()
    assert allocator.num_free_blocks == 8, "the second has room for 5 tokens, and holds no more"
    allocator.check_integrity()


def test_a_sequence_without_reuse_takes_over_blocks() -> None:
    """It computes the cached tokens again, then shares the cached blocks."""
    allocator = RadixAllocator(14, 1)
    tokens = [0, 1, 2, 3]
    finish(allocate(allocator, 4, tokens), tokens)
    first = allocate(allocator, 4, tokens, reuse=False)
    first.commit(tokens, 4)
    second = first.fork()
    assert allocator.num_free_blocks == 9
    for sequence in (first, second):
        assert sequence.extend(5)
        sequence.commit([*tokens, 5], 5)
        allocator.check_integrity()
    assert second.block_table == first.block_table
    for sequence in (first, second):
        sequence.free()
    allocator.check_integrity()
    assert allocator.num_free_blocks == 13
