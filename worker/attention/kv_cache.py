"""The KV cache: per layer one pool of keys and one of values, addressed by block id.

keys[layer]   (num_blocks, block_size, kv_heads, head_dim)     slot = block id * block_size + offset

Every entry is finite whenever no step runs, so that blocks may be read as padding. A step checks what it has written
(`find_extremes`); if that is not finite, the step fails and its slots are cleared (`clear`).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from cache.allocators.base import BlockCopy
from worker.attention.base import AttentionShape

_CHECKED_BYTES: Final = {"cpu": 4 << 20, "cuda": 64 << 20}
"""Written entries that are checked at a time: within a CPU's cache, and with few launches on a GPU."""


def _zeroed_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return pages that the kernel zeroes at their first use: to write gigabytes would delay every start."""
    num_bytes = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class KVCache:
    """The pools of all layers. Block 0 is the null block, which pads block tables and belongs to no sequence."""

    def __init__(
        self, shape: AttentionShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        pool = (2 * shape.num_layers, num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
        # Zeroed: padding has a weight of 0, but 0 times a NaN of uninitialised memory is NaN.
        pools = _zeroed_pages(pool, dtype) if device.type == "cpu" else torch.zeros(pool, dtype=dtype, device=device)
        self.dtype, self.device = pools.dtype, pools.device
        self.rows = pools.view(len(pools), num_blocks * block_size, -1)
        """(2 * layers, slots, kv_heads * head_dim): the same memory, first the keys of all layers"""
        self.block_bytes = pools[:, 0].nbytes
        """Size of one block over all layers, keys and values."""
        self.keys: list[Tensor] = list(pools[: shape.num_layers])
        self.values: list[Tensor] = list(pools[shape.num_layers :])

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor, query: Tensor | None = None) -> None:
        """Store (num_tokens, kv_heads, head_dim) at `slots` (num_tokens,).

        On a GPU, where `query` (num_tokens, heads, head_dim) is not finite, the stored key becomes NaN.
        """
        keys, values = self.keys[layer].flatten(0, 1), self.values[layer].flatten(0, 1)
        if keys.is_cuda:
            from worker.kernels.triton_ops import store

            store(key, value, slots, keys, values, query)
        else:
            keys.index_copy_(0, slots, key)
            values.index_copy_(0, slots, value)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in the order given: a later copy may read what an earlier one wrote."""
        for copy in copies:
            for pool in (*self.keys, *self.values):
                pool[copy.destination] = pool[copy.source]

    def find_extremes(self, slots: Tensor) -> Tensor:
        """Return (any number,) the lowest and highest entries at `slots`, over all layers."""
        row_bytes = self.rows[:, 0].nbytes
        part = max(1, _CHECKED_BYTES.get(slots.device.type, 4 << 20) // row_bytes)
        found = [self.rows.index_select(1, some).aminmax() for some in torch.split(slots, part)]
        return torch.stack([extreme for pair in found for extreme in pair])

    def clear(self, slots: Sequence[int]) -> None:
        """Zero the entries at `slots`."""
        self.rows.index_fill_(1, torch.tensor(slots, dtype=torch.int64, device=self.rows.device), 0.0)
