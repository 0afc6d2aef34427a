"""Chains that are kept over a pause: evicted after others, within bounds, and without a trace in what is found."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.allocators.hash import MAX_KEPT_SHARE, MIN_OTHERS_S, SURE_KEPT_SHARE, HashAllocator
from cache.hashing import hash_chain
from tests.cache.allocators.test_hash import OTHER_ROOT, ROOT, compute, free_order

SIZE = 4


def tokens(number: int, num_blocks: int) -> list[int]:
    return [1000 * number + at for at in range(num_blocks * SIZE)]


def serve(allocator: HashAllocator, token_ids: Sequence[int]) -> int:
    """Serve a request of these tokens and one more; return how many were found."""
    allocation = compute(allocator, [*token_ids, 7])
    allocation.free()
    return allocation.num_cached_tokens


def keep(
    allocator: HashAllocator, token_ids: Sequence[int], until_s: float = 100.0, tenant: str = "", prompt: int = 1 << 20
) -> int:
    return allocator.keep(hash_chain(ROOT, token_ids, SIZE), prompt, until_s, tenant)


def test_a_kept_chain_outlives_others_used_later() -> None:
    for kept in (True, False):
        allocator = HashAllocator(21, SIZE)
        serve(allocator, tokens(1, 5))
        assert not kept or keep(allocator, tokens(1, 5)) == 5
        for number in range(2, 12):
            serve(allocator, tokens(number, 5))
        allocator.check_integrity()
        assert serve(allocator, tokens(1, 5)) == (20 if kept else 0)


def test_the_next_request_ends_the_pause() -> None:
    allocator = HashAllocator(41, SIZE)
    serve(allocator, tokens(1, 5))
    keep(allocator, tokens(1, 5), prompt=4)
    assert serve(allocator, tokens(1, 4)) == 16, "an answer of another text still finds the prompt"
    for number in range(2, 12):
        serve(allocator, tokens(number, 5))
    assert allocator.find([*tokens(1, 5), 7], ROOT) == 0


def test_a_chain_is_kept_until_its_time_is_over() -> None:
    allocator = HashAllocator(41, SIZE)
    serve(allocator, tokens(1, 5))
    keep(allocator, tokens(1, 5), until_s=10.0)
    assert [allocator.expire(now_s) for now_s in (1.0, 9.0, 10.0, 11.0)] == [0, 0, 1, 0]
    for number in range(2, 12):
        serve(allocator, tokens(number, 5))
    assert allocator.find([*tokens(1, 5), 7], ROOT) == 0


def test_running_sequences_take_the_blocks_of_kept_chains() -> None:
    allocator = HashAllocator(21, SIZE)
    for number in (1, 2, 3):
        serve(allocator, tokens(number, 5))
        assert keep(allocator, tokens(number, 5)) == 5
    assert allocator.num_free_blocks == 20
    allocation = compute(allocator, tokens(9, 20))
    allocator.check_integrity()
    assert allocator.num_free_blocks == 0
    allocation.free()
    assert len(free_order(allocator)) == 20


def test_the_oldest_chain_of_the_largest_tenant_gives_way() -> None:
    allocator = HashAllocator(31, SIZE)
    for number, tenant in enumerate(("small", *["large"] * 6)):
        allocator.expire(2 * number * MIN_OTHERS_S)
        serve(allocator, tokens(number, 4))
        assert keep(allocator, tokens(number, 4), until_s=1e9, tenant=tenant) == 4, "24 of 31 blocks are the most"
        allocator.check_integrity()
    chains = [hash_chain(ROOT, tokens(number, 4), SIZE) for number in (0, 2, 3, 4, 5, 6)]
    assert [list(allocator._kept.own_blocks(chain))[::-1] for chain in allocator._kept] == [
        allocator.find_blocks(chain) for chain in chains
    ]


def test_others_stay_a_while_next_to_many_kept_chains() -> None:
    allocator = HashAllocator(101, SIZE)
    for number in range(8):
        serve(allocator, tokens(number, 8))
        keep(allocator, tokens(number, 8))
    now_s = 0.0
    for number in range(100, 140):
        now_s += 1.0
        allocator.expire(now_s)
        serve(allocator, tokens(number, 8))
    allocator.check_integrity()
    assert 0 < len(allocator._kept.parents) <= SURE_KEPT_SHARE * 101


def test_kept_chains_stay_while_others_are_old_enough() -> None:
    allocator = HashAllocator(101, SIZE)
    for number in range(8):
        serve(allocator, tokens(number, 8))
        keep(allocator, tokens(number, 8), until_s=1e9)
    now_s = 0.0
    for number in range(100, 140):
        now_s += MIN_OTHERS_S
        allocator.expire(now_s)
        serve(allocator, tokens(number, 8))
    assert len(allocator._kept.parents) == 64


def test_a_chain_longer_than_the_bound_is_not_kept() -> None:
    allocator = HashAllocator(21, SIZE)
    serve(allocator, tokens(1, 18))
    assert keep(allocator, tokens(1, 18)) == 0
    assert allocator.keep(hash_chain(OTHER_ROOT, tokens(1, 4), SIZE), 4, 100.0, "") == 0, "another tenant's hashes"
    allocator.check_integrity()


def test_a_reset_forgets_kept_chains() -> None:
    allocator = HashAllocator(21, SIZE)
    serve(allocator, tokens(1, 5))
    keep(allocator, tokens(1, 5))
    assert allocator.reset()
    allocator.check_integrity()
    assert allocator.num_free_blocks == 20
    assert keep(allocator, tokens(1, 5)) == 0


def test_stores_are_offered_kept_victims_when_the_queue_is_short() -> None:
    allocator = HashAllocator(21, SIZE)
    for number in (1, 2):
        serve(allocator, tokens(number, 8))
        keep(allocator, tokens(number, 8))
    hashes = hash_chain(ROOT, tokens(1, 8), SIZE)
    assert allocator.next_victims(8) == [hashes[7], hashes[6], hashes[5], hashes[4]]


def test_chains_of_one_prefix_need_memory_for_their_own_blocks() -> None:
    """Without that, one tenant with many short branches of a long prompt would fill the worker's memory."""
    allocator = HashAllocator(1201, SIZE)
    prefix = tokens(1, 400)
    serve(allocator, prefix)
    tracemalloc.start()
    try:
        for number in range(400):
            branch = [*prefix, *range(number, number + SIZE)]
            serve(allocator, branch)
            assert keep(allocator, branch) == 401
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    allocator.check_integrity()
    assert len(allocator._kept.parents) == 800
    assert num_bytes < 500_000


def test_a_greedy_tenant_leaves_others_their_blocks() -> None:
    """It asks for an hour with every request, and never comes back. Others, who ask for nothing, come back."""
    allocator = HashAllocator(101, SIZE)
    num_found = now_s = 0
    for number in range(60):
        now_s += 10
        allocator.expire(now_s)
        serve(allocator, tokens(1000 + number, 8))
        keep(allocator, tokens(1000 + number, 8), until_s=now_s + 3600.0, tenant="greedy")
        num_found += serve(allocator, tokens(number % 4, 8))
        assert len(allocator._kept.parents) <= MAX_KEPT_SHARE * 101
    allocator.check_integrity()
    assert num_found >= 0.8 * 60 * 8 * SIZE


@given(
    chats=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 8), st.sampled_from(("a", "b")), st.booleans()), max_size=30
    )
)
@settings(max_examples=80, deadline=None)
@pytest.mark.parametrize("num_blocks", [12, 30])
def test_no_wish_starves_a_request(num_blocks: int, chats: list[tuple[int, int, str, bool]]) -> None:
    """Whatever is kept, a request that fits into the pool gets its blocks, and kept chains stay within the bound."""
    allocator = HashAllocator(num_blocks, SIZE)
    for number, (start, length, tenant, is_kept) in enumerate(chats):
        token_ids = tokens(start, min(length, num_blocks - 2))
        serve(allocator, token_ids)
        if is_kept:
            keep(allocator, token_ids, until_s=float(number + 5), tenant=tenant)
        allocator.expire(float(number))
        allocator.check_integrity()
        assert len(allocator._kept.parents) <= MAX_KEPT_SHARE * num_blocks
        assert allocator.num_free_blocks == num_blocks - 1
    compute(allocator, tokens(9, num_blocks - 1)).free()
