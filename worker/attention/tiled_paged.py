"""Paged attention in float32 on a CPU: decodes and chunks run in one compiled kernel, which reads the pages in place.

A token's result is the same in every bit whatever shares its step, and however its prompt is cut into chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from torch import Tensor

from worker.attention.base import AttentionShape, ForwardBatch, Span
from worker.attention.kv_cache import KVCache
from worker.kernels.cpu import AttentionKernel, Kernels, Tiles

_MAX_QUERIES: Final = 192
"""Queries of a tile that share a KV head: enough to reuse its keys, few enough for the L2 cache."""


class TiledPagedAttention:
    """A `worker.attention.base.Attention` bound to one pool in float32 on a CPU."""

    name = "tiled"

    def __init__(self, shape: AttentionShape, cache: KVCache, kernels: Kernels) -> None:
        self._shape = shape
        self._cache = cache
        self._kernel = AttentionKernel(
            kernels,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            scale=shape.scale,
            block_size=cache.block_size,
        )
        self._tile_tokens = max(1, _MAX_QUERIES * shape.num_kv_heads // shape.num_heads)

    def plan(self, spans: Sequence[Span]) -> Tiles:
        tiles, first, size = [], 0, self._cache.block_size
        tables = np.zeros((len(spans), max(-(-span.stop // size) for span in spans)), np.int64)
        for index, span in enumerate(spans):
            num_blocks = -(-span.stop // size)
            tables[index, :num_blocks] = span.block_table[:num_blocks]
            for done in range(0, span.num_tokens, self._tile_tokens):
                num_tokens = min(self._tile_tokens, span.num_tokens - done)
                tiles.append((index, first + done, span.start + done, num_tokens))
            first += span.num_tokens
        return Tiles(tables, np.array(tiles, np.int64))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        assert isinstance(batch.plan, Tiles)
        out = query.new_empty(len(query), self._shape.query_size)
        keys, values, window = self._cache.keys[layer], self._cache.values[layer], self._shape.window(layer)
        self._kernel.attend_tiles((query, key, value), keys, values, batch.plan, batch.slots, out, window)
        return out
