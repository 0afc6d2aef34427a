"""Batch-invariant paged attention: a token's result does not depend on the rest of the batch, bit for bit.

Kernels of different shapes round differently. Here the shape of a token's product, and its row in it, depend only on
the token's position p:

    tile t = p // 16    queries 16 t .. 16 t + 15 (absent ones are zero)    keys 0 .. 16 t + 15 (later ones are masked)

It needs many small calls, so it only runs with `--deterministic`, and only if `tiled_paged` cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from worker.attention.base import AttentionShape, ForwardBatch, Span, show_nonfinite
from worker.attention.kv_cache import KVCache
from worker.kernels.device import to_device

TILE: Final = 16  # fixes how every product rounds: another number, other bits


@dataclass(frozen=True, slots=True)
class _SpanPlan:
    """A span whose first token is row `first` of the batch."""

    span: Span
    first: int
    blocks: Tensor
    """The blocks of the sequence, padded with the null block to whole tiles."""


class InvariantAttention:
    """A `worker.attention.base.Attention` bound to one pool."""

    name = "invariant"

    def __init__(self, shape: AttentionShape, cache: KVCache) -> None:
        self._shape = shape
        self._cache = cache

    def plan(self, spans: Sequence[Span]) -> tuple[_SpanPlan, ...]:
        plans, first = [], 0
        for span in spans:
            num_tiles = -(-span.stop // TILE)
            num_blocks = -(-num_tiles * TILE // self._cache.block_size)
            own = list(span.block_table[:num_blocks])
            blocks = to_device(own + [0] * (num_blocks - len(own)), torch.int64, self._cache.device)
            plans.append(_SpanPlan(span, first, blocks))
            first += span.num_tokens
        return tuple(plans)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        self._cache.write(layer, batch.slots, key, value)
        out = torch.empty_like(query)
        plans: tuple[_SpanPlan, ...] = batch.plan  # type: ignore[assignment]
        for plan in plans:
            span = plan.span
            # (1, kv_heads, keys, head_dim)
            keys, values = (
                pool[layer].index_select(0, plan.blocks).flatten(0, 1).transpose(0, 1).unsqueeze(0)
                for pool in (self._cache.keys, self._cache.values)
            )
            for tile in range(span.start // TILE, -(-span.stop // TILE)):
                begin, end = max(span.start, tile * TILE), min(span.stop, (tile + 1) * TILE)
                rows = slice(plan.first + begin - span.start, plan.first + end - span.start)
                tile_rows = slice(begin - tile * TILE, end - tile * TILE)
                queries = query.new_zeros(TILE, *query.shape[1:])
                queries[tile_rows] = query[rows]
                num_keys = (tile + 1) * TILE
                attended = functional.scaled_dot_product_attention(
                    queries.transpose(0, 1).unsqueeze(0),
                    keys[:, :, :num_keys],
                    values[:, :, :num_keys],
                    attn_mask=self._mask(layer, tile),
                    scale=self._shape.scale,
                    enable_gqa=True,
                )
                out[rows] = attended[0].transpose(0, 1)[tile_rows]
        return show_nonfinite(out.flatten(1), query)

    def _mask(self, layer: int, tile: int) -> Tensor:
        """Return (TILE, keys) additive: -inf where a position of the tile must not look."""
        age = torch.arange(tile * TILE, (tile + 1) * TILE)[:, None] - torch.arange((tile + 1) * TILE)[None, :]
        window = self._shape.window(layer)
        hidden = age < 0 if window is None else (age < 0) | (age >= window)
        mask = torch.zeros(hidden.shape, dtype=self._cache.dtype).masked_fill_(hidden, float("-inf"))
        return to_device(mask, self._cache.dtype, self._cache.device)
