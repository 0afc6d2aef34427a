"""Paged attention on a CPU in compiled kernels, which read the pages in place: in float32, and in bfloat16.

Chunks run in tiles. A token's result has the same bits for any batch, and for any division of its prompt into chunks.
Decodes in float32, and all with `is_deterministic`, run in tiles too. Other decodes in bfloat16 have a faster kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.attention.base import AttentionShape, ForwardBatch, Span, num_leading_decodes
from worker.attention.kv_cache import KVCache
from worker.kernels.cpu import AttentionKernel, Decodes, Kernels, Tiles

_MAX_QUERIES: Final = 192
"""Queries of a tile that share a KV head: many enough to reuse its keys, few enough for the L2 cache."""


@dataclass(frozen=True, slots=True)
class _TiledPlan:
    """The first rows of a step are those of `decodes`, the others of `tiles`."""

    num_decodes: int
    decodes: Mapping[int | None, Decodes]
    """By the window of a layer."""
    tiles: Tiles | None


class TiledPagedAttention:
    """A `worker.attention.base.Attention` bound to one pool in float32 or bfloat16 on a CPU."""

    name = "tiled"

    def __init__(
        self, shape: AttentionShape, cache: KVCache, kernels: Kernels, *, is_deterministic: bool = False
    ) -> None:
        self._shape = shape
        self._cache = cache
        self._kernel = make_kernel(shape, cache, kernels)
        self._tile_tokens = max(1, _MAX_QUERIES * shape.num_kv_heads // shape.num_heads)
        self._tiles_decodes = is_deterministic or cache.dtype == torch.float32

    def plan(self, spans: Sequence[Span]) -> _TiledPlan:
        num_decodes = 0 if self._tiles_decodes else num_leading_decodes(spans)
        windows = set(self._shape.windows) or {None}
        size = self._cache.block_size
        decodes = {window: plan_decodes(spans[:num_decodes], window, size) for window in windows if num_decodes}
        chunks = spans[num_decodes:]
        return _TiledPlan(num_decodes, decodes, self._plan_tiles(chunks) if chunks else None)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        plan = batch.plan
        assert isinstance(plan, _TiledPlan)
        out = query.new_empty(len(query), self._shape.query_size)
        keys, values, window = self._cache.keys[layer], self._cache.values[layer], self._shape.window(layer)
        num = plan.num_decodes
        if num:
            self._kernel((query[:num], key[:num], value[:num]), keys, values, plan.decodes[window], out[:num])
        if plan.tiles is not None:
            states = (query[num:], key[num:], value[num:])
            self._kernel.attend_tiles(states, keys, values, plan.tiles, batch.slots[num:], out[num:], window)
        return out

    def _plan_tiles(self, spans: Sequence[Span]) -> Tiles:
        tiles, first = [], 0
        for index, span in enumerate(spans):
            for done in range(0, span.num_tokens, self._tile_tokens):
                num_tokens = min(self._tile_tokens, span.num_tokens - done)
                tiles.append((index, first + done, span.start + done, num_tokens))
            first += span.num_tokens
        return Tiles(block_tables(spans, self._cache.block_size), np.array(tiles, np.int64))


def make_kernel(shape: AttentionShape, cache: KVCache, kernels: Kernels) -> AttentionKernel:
    return AttentionKernel(
        kernels,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        scale=shape.scale,
        block_size=cache.block_size,
    )


def plan_decodes(spans: Sequence[Span], window: int | None, block_size: int) -> Decodes:
    """Plan spans of one token each, which see the keys of a window."""
    bounds = [(0 if window is None else max(0, span.stop - window), span.stop) for span in spans]
    return Decodes(block_tables(spans, block_size), np.array(bounds, np.int64).reshape(-1, 2))


def block_tables(spans: Sequence[Span], block_size: int) -> NDArray[np.int64]:
    """Return the block tables, (sequences, width)."""
    tables = np.zeros((len(spans), max((-(-span.stop // block_size) for span in spans), default=0)), np.int64)
    for row, span in enumerate(spans):
        num_blocks = -(-span.stop // block_size)
        tables[row, :num_blocks] = span.block_table[:num_blocks]
    return tables
