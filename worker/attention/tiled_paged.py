"""Paged attention on a CPU in compiled kernels, which read the pages in place: in float32, and in bfloat16.

Chunks run in tiles. A token's result has the same bits for any batch, and for any division of its prompt into chunks.
Decodes in float32, and all with `is_deterministic`, run in tiles too. Other decodes in bfloat16 have a faster kernel;
there chunks may run in torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.attention.base import AttentionShape, ForwardBatch, Span, num_leading_decodes
from worker.attention.kv_cache import KVCache
from worker.attention.torch_paged import TorchPagedAttention
from worker.kernels.cpu import AttentionKernel, Decodes, Kernels, Tiles

_MAX_QUERIES: Final = 192
"""Queries of a tile that share a KV head: many enough to reuse its keys, few enough for the L2 cache."""


@dataclass(frozen=True, slots=True)
class _TiledPlan:
    """The first rows of a step are those of `decodes`, the others of `chunks`."""

    num_decodes: int
    decodes: Mapping[int | None, Decodes]
    """By the window of a layer."""
    chunks: Any
    """`Tiles`, or the plan of `TorchPagedAttention`; None without chunks."""


class TiledPagedAttention:
    """A `worker.attention.base.Attention` bound to one pool in float32 or bfloat16 on a CPU."""

    def __init__(
        self,
        shape: AttentionShape,
        cache: KVCache,
        kernels: Kernels,
        *,
        is_deterministic: bool = False,
        chunks_in_torch: bool = False,
    ) -> None:
        """`chunks_in_torch`: its products in bfloat16 use units that the kernels do not (AMX)."""
        self.name = "compiled" if chunks_in_torch else "tiled"
        self._shape = shape
        self._cache = cache
        self._torch = TorchPagedAttention(shape, cache) if chunks_in_torch else None
        self._kernel = AttentionKernel(
            kernels,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            scale=shape.scale,
            block_size=cache.block_size,
        )
        self._tile_tokens = max(1, _MAX_QUERIES * shape.num_kv_heads // shape.num_heads)
        self._tiles_decodes = is_deterministic or cache.dtype == torch.float32

    def plan(self, spans: Sequence[Span]) -> _TiledPlan:
        num_decodes = 0 if self._tiles_decodes else num_leading_decodes(spans)
        windows = set(self._shape.windows) or {None}
        decodes = {window: self._plan_decodes(spans[:num_decodes], window) for window in windows if num_decodes}
        plan_chunks = self._plan_tiles if self._torch is None else self._torch.plan
        return _TiledPlan(num_decodes, decodes, plan_chunks(spans[num_decodes:]) if spans[num_decodes:] else None)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        plan = batch.plan
        assert isinstance(plan, _TiledPlan)
        out = query.new_empty(len(query), self._shape.query_size)
        keys, values, window = self._cache.keys[layer], self._cache.values[layer], self._shape.window(layer)
        num = plan.num_decodes
        if num:
            self._kernel((query[:num], key[:num], value[:num]), keys, values, plan.decodes[window], out[:num])
        if plan.chunks is None:
            return out
        states = (query[num:], key[num:], value[num:])
        if self._torch is None:
            self._kernel.attend_tiles(states, keys, values, plan.chunks, batch.slots[num:], out[num:], window)
            return out
        rest = ForwardBatch(batch.token_ids[num:], batch.positions[num:], batch.slots[num:], plan.chunks)
        attended = self._torch.attend(layer, *states, rest)
        return torch.cat((out[:num], attended)) if num else attended

    def _plan_decodes(self, spans: Sequence[Span], window: int | None) -> Decodes:
        """Plan spans of one token each, which see the keys of a window."""
        bounds = [(0 if window is None else max(0, span.stop - window), span.stop) for span in spans]
        return Decodes(block_tables(spans, self._cache.block_size), np.array(bounds, np.int64))

    def _plan_tiles(self, spans: Sequence[Span]) -> Tiles:
        tiles, first = [], 0
        for index, span in enumerate(spans):
            for done in range(0, span.num_tokens, self._tile_tokens):
                num_tokens = min(self._tile_tokens, span.num_tokens - done)
                tiles.append((index, first + done, span.start + done, num_tokens))
            first += span.num_tokens
        return Tiles(block_tables(spans, self._cache.block_size), np.array(tiles, np.int64))


def block_tables(spans: Sequence[Span], block_size: int) -> NDArray[np.int64]:
    """Return the block tables, (sequences, width)."""
    tables = np.zeros((len(spans), max((-(-span.stop // block_size) for span in spans), default=0)), np.int64)
    for row, span in enumerate(spans):
        num_blocks = -(-span.stop // block_size)
        tables[row, :num_blocks] = span.block_table[:num_blocks]
    return tables
