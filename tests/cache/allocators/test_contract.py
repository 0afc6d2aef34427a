"""The contract that every allocator keeps, by the names of `--prefix-cache`."""

from __future__ import annotations

import pytest

from cache.allocators import PREFIX_CACHES, PrefixCache, make_allocator
from cache.allocators.hash import HashAllocator
from cache.allocators.plain import PlainAllocator
from cache.allocators.radix import RadixAllocator


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


@pytest.mark.parametrize("kind", PREFIX_CACHES)
@pytest.mark.parametrize(("num_blocks", "block_size", "field"), [(1, 4, "num_blocks"), (4, 0, "block_size")])
def test_a_bad_size_is_named(kind: PrefixCache, num_blocks: int, block_size: int, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        make_allocator(kind, num_blocks, block_size)
