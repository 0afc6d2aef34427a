"""Paged attention in plain torch: for CPUs, and the reference that other backends are compared with.

Decodes are grouped by context length. A group's pages are gathered into one padded rectangle and go through one fused
call. The queries that share a KV head are rows of one small matrix, so nothing is repeated for GQA.

A prefill chunk attends causally to its own tokens, and without a mask to the gathered pages before it. The two parts
are merged by their log-sum-exps, as in flash decoding, so no (chunk x context) mask is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from worker.attention.base import AttentionShape, ForwardBatch, Span, num_leading_decodes, show_nonfinite
from worker.attention.kv_cache import KVCache
from worker.kernels.device import to_device

_MAX_PADDING: Final = 1.25
"""A group of decodes may read this many times the keys of its sequences. A lower bound means more, smaller calls."""
# The public function does not return the log-sum-exps by which two parts are merged.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Rows first..stop-1 of the batch: their pages, and the mask of the padding."""

    first: int
    stop: int
    blocks: Tensor | slice
    """(rows * blocks per row,) int64, or a run of consecutive blocks, which is read in place"""
    num_keys: int
    mask: Tensor | None
    """(rows, 1, 1, num_keys) additive, or None when nothing is padded"""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows first..stop-1 of the batch are one sequence's. `blocks` hold the tokens before them that they may see."""

    first: int
    stop: int
    blocks: Tensor | slice | None
    skip: int
    """Keys of the first block that are before the window."""
    num_prefix: int
    mask: Tensor | None
    """(chunk, prefix + chunk) additive, for a window, or where merging is not available."""


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """The groups and chunks of a step, for one width of window."""

    decodes: tuple[_DecodeGroup, ...]
    chunks: tuple[_Chunk, ...]


class TorchPagedAttention:
    """A `worker.attention.base.Attention` bound to one pool."""

    name = "torch"

    def __init__(self, shape: AttentionShape, cache: KVCache) -> None:
        self._shape = shape
        self._cache = cache
        self._scratch: dict[str, Tensor] = {}
        """Gathered keys and values. Layers run one after the other, so they share these."""

    def plan(self, spans: Sequence[Span]) -> dict[int | None, PagedPlan]:
        """Plan once for each width of window that the model's layers have."""
        windows = set(self._shape.windows) or {None}
        return {window: self._plan(spans, window) for window in windows}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        self._cache.write(layer, batch.slots, key, value)
        plan = batch.plan[self._shape.window(layer)]  # type: ignore[index]
        outputs = [self._decode(layer, query, group) for group in plan.decodes]
        outputs += [self._prefill(layer, query, key, value, chunk) for chunk in plan.chunks]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _plan(self, spans: Sequence[Span], window: int | None) -> PagedPlan:
        """Plan a step. A decode sees tokens low..stop-1. It gathers whole blocks, so also those before `low` in one."""
        num_decodes, size = num_leading_decodes(spans), self._cache.block_size
        lows = [0 if window is None else max(0, span.stop - window) for span in spans[:num_decodes]]
        num_gathered = [span.stop - low // size * size for span, low in zip(spans[:num_decodes], lows, strict=True)]
        groups = _group_by_length(num_gathered)
        decodes = tuple(self._plan_group(spans[start:stop], lows[start:stop], start) for start, stop in groups)
        firsts = accumulate((span.num_tokens for span in spans), initial=0)
        placed = list(zip(spans, firsts, strict=False))[num_decodes:]
        return PagedPlan(decodes, tuple(self._plan_chunk(span, first, window) for span, first in placed))

    def _plan_group(self, spans: Sequence[Span], lows: Sequence[int], first: int) -> _DecodeGroup:
        """Plan decodes that see keys low..stop-1 each."""
        size = self._cache.block_size
        begins = [low % size for low in lows]
        ends = [span.stop - low // size * size for span, low in zip(spans, lows, strict=True)]
        tables = [
            list(span.block_table[low // size : -(-span.stop // size)]) for span, low in zip(spans, lows, strict=True)
        ]
        width, num_keys = max(map(len, tables)), max(ends)
        padded = [block for table in tables for block in table + [0] * (width - len(table))]
        mask = None
        if len(spans) > 1 or begins[0]:
            columns = torch.arange(num_keys)
            hidden = (columns < torch.tensor(begins)[:, None]) | (columns >= torch.tensor(ends)[:, None])
            mask = self._additive(hidden)[:, None, None, :]
        return _DecodeGroup(first, first + len(spans), self._indices(padded), num_keys, mask)

    def _plan_chunk(self, span: Span, first: int, window: int | None) -> _Chunk:
        size = self._cache.block_size
        low = 0 if window is None else max(0, span.start - window + 1)
        blocks = list(span.block_table[low // size : -(-span.start // size)])
        mask = None
        needs_window = window is not None and span.stop - low > window
        if needs_window or (span.start and self._cache.device.type != "cpu"):  # `_flash` exists on a CPU only
            age = torch.arange(span.start, span.stop)[:, None] - torch.arange(low, span.stop)[None, :]
            mask = self._additive((age < 0) | (age >= (window or span.stop)))
        return _Chunk(
            first=first,
            stop=first + span.num_tokens,
            blocks=self._indices(blocks) if blocks else None,
            skip=low % size,
            num_prefix=span.start - low,
            mask=mask,
        )

    def _decode(self, layer: int, query: Tensor, group: _DecodeGroup) -> Tensor:
        shape, rows = self._shape, group.stop - group.first
        keys, values = self._gather(layer, group.blocks)
        # (rows, kv_heads, keys, head_dim) and (rows, kv_heads, queries of a kv head, head_dim)
        keys, values = (
            pages.view(rows, -1, shape.num_kv_heads, shape.head_dim)[:, : group.num_keys].transpose(1, 2)
            for pages in (keys, values)
        )
        grouped = query[group.first : group.stop].reshape(rows, shape.num_kv_heads, -1, shape.head_dim)
        out = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask, scale=shape.scale)
        return show_nonfinite(out.reshape(rows, shape.num_heads * shape.head_dim), query[group.first : group.stop])

    def _prefill(self, layer: int, query: Tensor, key: Tensor, value: Tensor, chunk: _Chunk) -> Tensor:
        rows, scale = slice(chunk.first, chunk.stop), self._shape.scale
        # (1, heads, tokens, head_dim)
        queries, keys, values = (states[rows].transpose(0, 1).unsqueeze(0) for states in (query, key, value))
        if chunk.mask is None and chunk.num_prefix > 0:
            own = _flash(queries, keys, values, 0.0, True, scale=scale)
            earlier = _flash(queries, *self._prefix(layer, chunk), 0.0, False, scale=scale)
            out = merge_partials(*own, *earlier)
        else:
            if chunk.blocks is not None:
                prefix = self._prefix(layer, chunk)
                keys, values = torch.cat((prefix[0], keys), dim=2), torch.cat((prefix[1], values), dim=2)
            out = functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=chunk.mask, is_causal=chunk.mask is None, scale=scale, enable_gqa=True
            )
        return show_nonfinite(out.squeeze(0).transpose(0, 1).flatten(1), query[rows])

    def _prefix(self, layer: int, chunk: _Chunk) -> tuple[Tensor, Tensor]:
        """Gather the keys and values before the chunk, (1, kv_heads, num_prefix, head_dim)."""
        assert chunk.blocks is not None
        keys, values = self._gather(layer, chunk.blocks)
        first, stop = chunk.skip, chunk.skip + chunk.num_prefix
        keys, values = (pages.flatten(0, 1)[first:stop].transpose(0, 1).unsqueeze(0) for pages in (keys, values))
        return keys, values

    def _gather(self, layer: int, blocks: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return the pages of `blocks`: a run in place, others as a copy that the next call overwrites."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        if isinstance(blocks, slice):
            return keys[blocks], values[blocks]
        return (
            torch.index_select(keys, 0, blocks, out=self._buffer("keys", keys, len(blocks))),
            torch.index_select(values, 0, blocks, out=self._buffer("values", values, len(blocks))),
        )

    def _buffer(self, name: str, pool: Tensor, num_blocks: int) -> Tensor:
        buffer = self._scratch.get(name)
        if buffer is None or len(buffer) < num_blocks:
            capacity = 1 << (num_blocks - 1).bit_length()
            buffer = self._scratch[name] = pool.new_empty(capacity, *pool.shape[1:])
        return buffer[:num_blocks]

    def _indices(self, blocks: Sequence[int]) -> Tensor | slice:
        first = blocks[0]
        if all(block == first + index for index, block in enumerate(blocks)):
            return slice(first, first + len(blocks))
        return to_device(blocks, torch.int64, self._cache.device)

    def _additive(self, hidden: Tensor) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._cache.dtype)
        return to_device(mask.masked_fill_(hidden, float("-inf")), self._cache.dtype, self._cache.device)


def merge_partials(one: Tensor, one_lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Merge attention over two disjoint sets of keys: outputs (..., head_dim), log-sum-exps (...) float32.

    Source: FlashDecoding's reduction, out = sum of out_i * exp(lse_i - lse).
    """
    share = torch.sigmoid(other_lse.float() - one_lse.float()).unsqueeze(-1)
    return torch.lerp(one.float(), other.float(), share).to(one.dtype)


def _group_by_length(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut consecutive decodes into runs [start, stop) whose padded rectangle wastes little."""
    start, total, longest = 0, 0, 0
    for row, length in enumerate(lengths):
        longest, total = max(longest, length), total + length
        if row > start and longest * (row + 1 - start) > _MAX_PADDING * total:
            yield start, row
            start, total, longest = row, length, length
    if lengths:
        yield start, len(lengths)
