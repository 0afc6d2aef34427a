"""The memory behind the block ids: per layer one pool of keys and one of values.

keys[layer]   (num_blocks, block_size, kv_heads, head_dim)     slot = block id * block_size + offset
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cache.allocator import BlockCopy
from worker.attention.base import AttentionShape


class KVCache:
    """Owner of the pools. Block 0 is the null block: it pads block tables and is never a real sequence's."""

    __slots__ = ("block_size", "keys", "num_blocks", "values")

    def __init__(
        self, shape: AttentionShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is never used), got {num_blocks}")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        pool = (num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
        # Zeroed: padding is masked by a weight of 0, and 0 * NaN of uninitialised memory would not be 0.
        self.keys = [torch.zeros(pool, dtype=dtype, device=device) for _ in range(shape.num_layers)]
        self.values = [torch.zeros(pool, dtype=dtype, device=device) for _ in range(shape.num_layers)]

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store (num_tokens, kv_heads, head_dim) at `slots` (num_tokens,)."""
        keys, values = self.keys[layer].flatten(0, 1), self.values[layer].flatten(0, 1)
        if keys.is_cuda:
            from worker.gpu_kernels import store

            store(key, value, slots, keys, values)
        else:
            keys.index_copy_(0, slots, key)
            values.index_copy_(0, slots, value)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """In the order given: a later copy may read what an earlier one wrote."""
        for copy in copies:
            for pool in (*self.keys, *self.values):
                pool[copy.destination] = pool[copy.source]

    def scrub(self, block_table: Sequence[int]) -> None:
        """Zero what is not finite in these blocks, so that a broken step cannot reach their next owner."""
        blocks = torch.tensor(list(block_table), dtype=torch.int64, device=self.keys[0].device)
        for pool in (*self.keys, *self.values):
            pool[blocks] = pool[blocks].nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
