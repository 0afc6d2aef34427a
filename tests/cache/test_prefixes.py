from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.allocators.base import Allocator
from cache.allocators.factory import PrefixCache, make_allocator
from cache.hashing import hash_chain
from cache.prefixes import PrefixRun, SharedPrefix, top_prefixes
from cache.types import BlockHash

SIZE = 4
ROOT = BlockHash(b"r" * 16)


def serve(allocator: Allocator, token_ids: list[int], root: BlockHash = ROOT) -> int:
    """One request from its start to its end; the tokens it found."""
    allocation = allocator.allocate(len(token_ids), token_ids, root)
    assert allocation is not None
    allocation.commit(token_ids, len(token_ids))
    allocation.free()
    return allocation.num_cached_tokens


def hashes(*names: str) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(name.encode()) for name in names)


def run(parent: str, names: str, hits: int, references: int = 0, idle: int = 0) -> PrefixRun:
    return PrefixRun(BlockHash(parent.encode()), hashes(*names), references, hits, idle)


def test_a_prefix_is_reported_where_matches_ended() -> None:
    runs = [run("root", "abc", 1), run("c", "de", 7, 2, 5), run("c", "f", 1), run("f", "g", 0)]
    assert top_prefixes(runs, 10) == [
        SharedPrefix(hashes("root", "c", "e"), 5, 2, 7, 5),
        SharedPrefix(hashes("root", "c"), 3, 0, 9, 0),
        SharedPrefix(hashes("root", "c", "f"), 4, 0, 1, 0),
    ]
    assert [prefix.num_hits for prefix in top_prefixes(runs, 1)] == [7]
    branch = [run("root", "abc", 0), run("c", "de", 7), run("c", "f", 1)]
    assert SharedPrefix(hashes("root", "c"), 3, 0, 8, 0) in top_prefixes(branch, 10), "where two of them part"
    assert top_prefixes([], 3) == []


def test_runs_and_single_blocks_say_the_same() -> None:
    whole = [run("root", "abc", 3), run("c", "de", 2)]
    single = [run("root", "a", 0), run("a", "b", 0), run("b", "c", 3), run("c", "d", 0), run("d", "e", 2)]
    assert top_prefixes(whole, 9) == top_prefixes(single, 9)


@pytest.mark.parametrize("kind", ["hash", "radix"])
@given(prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), min_size=1, max_size=25))
def test_hits_are_the_matches_of_requests(kind: PrefixCache, prompts: list[list[int]]) -> None:
    """Without evictions every prefix counts the requests that found at least it."""
    allocator = make_allocator(kind, 500, SIZE)
    found: Counter[BlockHash] = Counter()
    depths = {}
    for blocks in prompts:
        token_ids = [100 * block + i for block in blocks for i in range(SIZE)] + [999]
        chain = hash_chain(ROOT, token_ids, SIZE)
        num_found = serve(allocator, token_ids) // SIZE
        found.update(chain[:num_found])
        depths.update({block: depth for depth, block in enumerate(chain, 1)})
    told = {prefix.path[-1]: prefix for prefix in top_prefixes(allocator.prefix_runs(), 1000)}
    assert all(prefix.num_hits == found[block] for block, prefix in told.items())
    assert all(prefix.num_blocks == depths[block] for block, prefix in told.items())
    assert all(prefix.path[0] == ROOT for prefix in told.values())
    assert max((p.num_hits for p in told.values()), default=0) == max(found.values(), default=0)
    allocator.check_integrity()


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_tenants_references_and_idleness(kind: PrefixCache) -> None:
    allocator = make_allocator(kind, 100, SIZE)
    other = BlockHash(b"o" * 16)
    for root in (ROOT, ROOT, other, other, other):
        serve(allocator, list(range(9)), root)
    (first, second) = top_prefixes(allocator.prefix_runs(), 10)
    assert (first.path[0], first.num_hits, first.num_references) == (other, 2, 0)
    assert (second.path[0], second.num_hits) == (ROOT, 1)
    assert second.idle_accesses > first.idle_accesses
    allocation = allocator.allocate(9, list(range(9)), ROOT)
    assert allocation is not None
    held = {prefix.path[0]: prefix for prefix in top_prefixes(allocator.prefix_runs(), 10)}
    assert (held[ROOT].num_references, held[ROOT].idle_accesses) == (1, 0)
    assert held[other].num_references == 0
    allocation.free()


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_what_was_evicted_or_cleared_is_forgotten(kind: PrefixCache) -> None:
    allocator = make_allocator(kind, 6, SIZE)
    serve(allocator, list(range(9)))
    serve(allocator, list(range(9)))
    assert len(top_prefixes(allocator.prefix_runs(), 10)) == 1
    serve(allocator, list(range(1000, 1020)))  # all five blocks
    assert top_prefixes(allocator.prefix_runs(), 10) == []
    serve(allocator, list(range(1000, 1020)))
    assert [prefix.num_hits for prefix in top_prefixes(allocator.prefix_runs(), 10)] == [1]
    assert allocator.reset()
    assert list(allocator.prefix_runs()) == []


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_hits_of_before_a_reset_are_forgotten(kind: PrefixCache) -> None:
    allocator = make_allocator(kind, 4, SIZE)  # so small that the same blocks hold the same again
    for _ in range(3):
        for _ in range(2):
            serve(allocator, list(range(9)))
        assert [prefix.num_hits for prefix in top_prefixes(allocator.prefix_runs(), 10)] == [1]
        assert allocator.reset()


def test_a_copy_outlives_changes_of_the_pool() -> None:
    allocator = make_allocator("hash", 100, SIZE)
    for _ in range(2):
        serve(allocator, list(range(9)))
    runs = allocator.prefix_runs()
    assert allocator.reset()
    assert [prefix.num_hits for prefix in top_prefixes(runs, 10)] == [1]


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    allocator = make_allocator("off", 100, SIZE)
    serve(allocator, list(range(9)))
    assert list(allocator.prefix_runs()) == []
