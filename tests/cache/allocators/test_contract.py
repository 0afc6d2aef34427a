"""The contract that every allocator keeps, by the names of `--prefix-cache`."""

from __future__ import annotations

import pytest

from cache.allocators import PREFIX_CACHES, PrefixCache, make_allocator
from cache.allocators.hash import HashAllocator
from cache.allocators.plain import PlainAllocator
from cache.allocators.radix import RadixAllocator
from cache.hashing import Namespace
from tests.cache.held import cached_hashes

ROOT = Namespace("model", "main", "tokenizer", 4).root(salt=b"tenant")
OTHER_ROOT = Namespace("model", "main", "tokenizer", 4).root(salt=b"another tenant")


def test_every_name_has_its_allocator() -> None:
    assert isinstance(make_allocator("hash", 10, 4), HashAllocator)
    assert isinstance(make_allocator("radix", 10, 4), RadixAllocator)
    off = make_allocator("off", 10, 4, window_size=8)
    assert isinstance(off, PlainAllocator)
    assert off.num_free_blocks == 9


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_a_window_needs_off(kind: str) -> None:
    with pytest.raises(ValueError, match="window_size"):
        make_allocator(kind, 10, 4, window_size=8)  # type: ignore[arg-type]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="hash, radix, off"):
        make_allocator("lru", 10, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", PREFIX_CACHES)
@pytest.mark.parametrize(("num_blocks", "block_size", "field"), [(1, 4, "num_blocks"), (4, 0, "block_size")])
def test_a_bad_size_is_named(kind: PrefixCache, num_blocks: int, block_size: int, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        make_allocator(kind, num_blocks, block_size)


@pytest.mark.parametrize("kind", PREFIX_CACHES)
def test_reset_only_when_idle(kind: PrefixCache) -> None:
    allocator = make_allocator(kind, 20, 4)
    allocation = allocator.allocate(9, range(9), ROOT)
    assert allocation is not None
    allocation.commit(range(9), 9)
    found = allocator.find(range(9), ROOT)
    assert found == (0 if kind == "off" else 8)
    assert not allocator.reset()
    assert allocator.find(range(9), ROOT) == found
    allocation.free()
    assert allocator.reset()
    assert allocator.find(range(9), ROOT) == 0
    assert allocator.take_events() == []
    assert cached_hashes(allocator) == []
    allocator.check_integrity()
    assert allocator.num_free_blocks == 19


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_tenants_share_nothing(kind: PrefixCache) -> None:
    allocator = make_allocator(kind, 20, 4)
    allocation = allocator.allocate(9, range(9), ROOT)
    assert allocation is not None
    allocation.commit(range(9), 9)
    allocation.free()
    assert allocator.find(range(9), ROOT) == 8
    assert allocator.find(range(9), OTHER_ROOT) == 0
