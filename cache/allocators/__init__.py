"""The allocators, by the names that `--prefix-cache` takes."""

from __future__ import annotations

from typing import Final, Literal, get_args

from cache.allocators.base import Allocator
from cache.allocators.hash import HashAllocator
from cache.allocators.plain import PlainAllocator
from cache.allocators.radix import RadixAllocator

PrefixCache = Literal["hash", "radix", "off"]
PREFIX_CACHES: Final[tuple[PrefixCache, ...]] = get_args(PrefixCache)


def make_allocator(kind: PrefixCache, num_blocks: int, block_size: int, window_size: int | None = None) -> Allocator:
    """Return an allocator of `num_blocks` blocks, the null block included. Raises ValueError that names the option.

    `window_size` is for a model with a sliding window, and for `off` only: the window and the longest chunk together.
    """
    if window_size is not None and kind != "off":
        raise ValueError(f"window_size needs prefix_cache off: a sliding window drops the heads that {kind} would find")
    if kind == "off":
        return PlainAllocator(num_blocks, block_size, window_size)
    return (HashAllocator if kind == "hash" else RadixAllocator)(num_blocks, block_size)
