"""Paged attention in plain torch: the CPU's kernel, and the oracle that other kernels are compared with.

Decodes are grouped by context length. A group's pages are gathered into one padded rectangle and go through one fused
call; the queries that share a KV head stand as rows of one small matrix, so nothing is repeated for GQA. A prefill
chunk attends to its own tokens causally and, when tokens come before it, to their gathered pages without a mask; the
two are merged by their log-sum-exps (flash decoding's merge), so no (chunk x context) mask is ever built.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from worker.attention.base import AttentionShape, ForwardBatch, Span, merge_partials, show_nonfinite
from worker.attention.kv_cache import KVCache
from worker.device import to_device

_MAX_PADDING: Final = 1.25
"""A group of decodes may read this much more than its sequences hold; a tighter bound means more, smaller calls."""
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Rows first..stop-1 of the batch: their pages, and what hides the padding."""

    first: int
    stop: int
    blocks: Tensor | slice
    """(rows * blocks per row,) int64, or a run of consecutive blocks, which can be read where they lie"""
    num_keys: int
    mask: Tensor | None
    """(rows, 1, 1, num_keys) additive, or None when there is nothing to hide"""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows first..stop-1 are one sequence's; `blocks` hold what it may see of the tokens before them."""

    first: int
    stop: int
    blocks: Tensor | slice | None
    skip: int
    """Keys of the first block that lie before the window."""
    num_prefix: int
    mask: Tensor | None
    """(chunk, prefix + chunk) additive; where a window hides more than causality does, or partials are missing."""


@dataclass(frozen=True, slots=True)
class PagedPlan:
    decodes: tuple[_DecodeGroup, ...]
    chunks: tuple[_Chunk, ...]


class TorchPagedAttention:
    """A `worker.attention.base.Attention` bound to one pool."""

    __slots__ = ("_cache", "_dtype", "_scratch", "_shape")

    name = "torch"

    def __init__(self, shape: AttentionShape, cache: KVCache) -> None:
        self._shape = shape
        self._cache = cache
        self._dtype = cache.keys[0].dtype
        self._scratch: dict[str, Tensor] = {}

    def plan(self, spans: Sequence[Span]) -> dict[int | None, PagedPlan]:
        """One plan for each width of window that the model's layers have."""
        windows = set(self._shape.windows) or {None}
        return {window: self._plan(spans, window) for window in windows}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        self._write(layer, batch, key, value)
        plan = batch.plan[self._shape.window(layer)]  # type: ignore[index]
        outputs = self._decode_all(layer, query, plan)
        outputs += [self._prefill(layer, query, key, value, chunk) for chunk in plan.chunks]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _write(self, layer: int, batch: ForwardBatch, key: Tensor, value: Tensor) -> None:
        self._cache.write(layer, batch.slots, key, value)

    def _plan(self, spans: Sequence[Span], window: int | None) -> PagedPlan:
        num_decodes = next((row for row, span in enumerate(spans) if span.num_tokens > 1), len(spans))
        groups = _group_by_length([_visible(span, window, self._cache.block_size) for span in spans[:num_decodes]])
        decodes = tuple(self._plan_group(spans[start:stop], start, window) for start, stop in groups)
        return PagedPlan(decodes, self._plan_chunks(spans, num_decodes, window))

    def _plan_chunks(self, spans: Sequence[Span], num_decodes: int, window: int | None) -> tuple[_Chunk, ...]:
        chunks, first = [], num_decodes
        for span in spans[num_decodes:]:
            chunks.append(self._plan_chunk(span, first, window))
            first += span.num_tokens
        return tuple(chunks)

    def _plan_group(self, spans: Sequence[Span], first: int, window: int | None) -> _DecodeGroup:
        size = self._cache.block_size
        lows = [0 if window is None else max(0, span.stop - window) for span in spans]
        tables = [
            list(span.block_table[low // size : -(-span.stop // size)]) for span, low in zip(spans, lows, strict=True)
        ]
        width = max(map(len, tables))
        padded = [block for table in tables for block in table + [0] * (width - len(table))]
        begins = [low % size for low in lows]
        ends = [span.stop - low // size * size for span, low in zip(spans, lows, strict=True)]
        num_keys = max(ends)
        hidden = _outside(begins, ends, num_keys) if len(spans) > 1 or begins[0] else None
        return _DecodeGroup(
            first=first,
            stop=first + len(spans),
            blocks=self._indices(padded),
            num_keys=num_keys,
            mask=None if hidden is None else self._additive(hidden)[:, None, None, :],
        )

    def _plan_chunk(self, span: Span, first: int, window: int | None) -> _Chunk:
        size = self._cache.block_size
        low = 0 if window is None else max(0, span.start - window + 1)
        blocks = list(span.block_table[low // size : -(-span.start // size)])
        mask = None
        hides_more = window is not None and span.stop - low > window
        if hides_more or (span.start and self._device.type != "cpu"):  # partial attentions exist on CPU alone
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

    def _decode_all(self, layer: int, query: Tensor, plan: PagedPlan) -> list[Tensor]:
        return [self._decode(layer, query, group) for group in plan.decodes]

    def _decode(self, layer: int, query: Tensor, group: _DecodeGroup) -> Tensor:
        shape, rows = self._shape, group.stop - group.first
        keys, values = self._gather(layer, group.blocks)
        # (rows, kv_heads, keys, head_dim) and (rows, kv_heads, queries of a kv head, head_dim)
        keys, values = (
            pages.view(rows, -1, shape.num_kv_heads, shape.head_dim)[:, : group.num_keys].transpose(1, 2)
            for pages in (keys, values)
        )
        grouped = query[group.first : group.stop].reshape(rows, shape.num_kv_heads, -1, shape.head_dim)
        out = functional.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=group.mask, scale=self._shape.scale
        )
        return show_nonfinite(out.reshape(rows, shape.num_heads * shape.head_dim), query[group.first : group.stop])

    def _prefill(self, layer: int, query: Tensor, key: Tensor, value: Tensor, chunk: _Chunk) -> Tensor:
        rows = slice(chunk.first, chunk.stop)
        # (1, heads, tokens, head_dim)
        queries, keys, values = (states[rows].transpose(0, 1).unsqueeze(0) for states in (query, key, value))
        if chunk.mask is not None:
            if chunk.blocks is not None:
                earlier = self._prefix(layer, chunk)
                keys, values = torch.cat((earlier[0], keys), dim=2), torch.cat((earlier[1], values), dim=2)
            out = functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=chunk.mask, scale=self._shape.scale, enable_gqa=True
            )
        elif chunk.num_prefix == 0:
            out = functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=self._shape.scale, enable_gqa=True
            )
        else:
            own = _flash(queries, keys, values, 0.0, True, scale=self._shape.scale)
            earlier = _flash(queries, *self._prefix(layer, chunk), 0.0, False, scale=self._shape.scale)
            out = merge_partials(*own, *earlier)
        return show_nonfinite(out.squeeze(0).transpose(0, 1).flatten(1), query[rows])

    def _prefix(self, layer: int, chunk: _Chunk) -> tuple[Tensor, Tensor]:
        """Keys and values before the chunk, (1, kv_heads, num_prefix, head_dim)."""
        assert chunk.blocks is not None
        keys, values = self._gather(layer, chunk.blocks)
        first, stop = chunk.skip, chunk.skip + chunk.num_prefix
        keys, values = (pages.flatten(0, 1)[first:stop].transpose(0, 1).unsqueeze(0) for pages in (keys, values))
        return keys, values

    def _gather(self, layer: int, blocks: Tensor | slice) -> tuple[Tensor, Tensor]:
        """The pages of `blocks`: a run in place, others copied into scratch memory that the next call overwrites."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        if isinstance(blocks, slice):
            return keys[blocks], values[blocks]
        return (
            torch.index_select(keys, 0, blocks, out=self._buffer("keys", keys, len(blocks))),
            torch.index_select(values, 0, blocks, out=self._buffer("values", values, len(blocks))),
        )

    def _indices(self, blocks: Sequence[int]) -> Tensor | slice:
        first = blocks[0]
        if all(block == first + place for place, block in enumerate(blocks)):
            return slice(first, first + len(blocks))
        return to_device(blocks, torch.int64, self._device)

    def _buffer(self, name: str, pool: Tensor, num_blocks: int) -> Tensor:
        buffer = self._scratch.get(name)
        if buffer is None or len(buffer) < num_blocks:
            room = 1 << (num_blocks - 1).bit_length()
            buffer = self._scratch[name] = pool.new_empty(room, *pool.shape[1:])
        return buffer[:num_blocks]

    def _additive(self, hidden: Tensor) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._dtype)
        return to_device(mask.masked_fill_(hidden, float("-inf")), self._dtype, self._device)

    @property
    def _device(self) -> torch.device:
        return self._cache.keys[0].device


def _visible(span: Span, window: int | None, block_size: int) -> int:
    """Keys that are gathered for a decode."""
    low = 0 if window is None else max(0, span.stop - window)
    return span.stop - low // block_size * block_size


def _group_by_length(lengths: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Cut consecutive decodes into runs [start, stop) whose padded rectangle wastes little."""
    start, total, longest = 0, 0, 0
    for row, length in enumerate(lengths):
        longest_with, total_with = max(longest, length), total + length
        if row > start and longest_with * (row + 1 - start) > _MAX_PADDING * total_with:
            yield start, row
            start, total_with, longest_with = row, length, length
        total, longest = total_with, longest_with
    if lengths:
        yield start, len(lengths)


def _outside(begins: Sequence[int], ends: Sequence[int], num_keys: int) -> Tensor:
    """(rows, num_keys) bool: True outside of [begin, end)."""
    columns = torch.arange(num_keys)
    return (columns < torch.tensor(begins)[:, None]) | (columns >= torch.tensor(ends)[:, None])
