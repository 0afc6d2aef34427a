"""Paged attention through xformers' Triton split-K kernel, for CUDA. The only module that imports xformers.

A decode reads its pages where they lie. A prefill chunk is two partial attentions, merged by their log-sum-exps: one
over the pages before it (paged, no mask), one over its own tokens (causal flash attention); nothing is gathered.

    keys of a chunk's queries   |<-- pages before the chunk: split-K -->|<-- own tokens: flash, causal -->|

Source: docs of the kernel in xformers.ops.fmha.triton_splitk (v0.0.35). Its tile of keys must divide the page, so that
pages of 16 and 32 tokens take a subclass with a smaller tile. On CPU the same kernel runs in Triton's interpreter, and
the chunk's own part in torch's CPU kernel: that is how it is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from xformers.ops import fmha
from xformers.ops.fmha import attn_bias, flash, triton_splitk
from xformers.ops.fmha.common import Inputs

from worker.attention.base import AttentionShape, ForwardBatch, Span
from worker.attention.kv_cache import KVCache
from worker.attention.merge import merge_partials
from worker.transfer import to_device

HEAD_DIMS: Final = frozenset({16, 32, 64, 128, 256})
DTYPES: Final = frozenset({torch.float16, torch.bfloat16})
_TILE: Final = 64


@dataclass(frozen=True, slots=True)
class _Paged:
    """Queries first..stop-1 of the batch over the pages of their rows."""

    rows: Tensor | slice
    bias: Any


@dataclass(frozen=True, slots=True)
class _Plan:
    num_decodes: int
    decodes: _Paged | None
    prefixes: _Paged | None
    """The chunks that have tokens before them."""
    chunk_lens: tuple[int, ...]
    own_bias: Any
    """Causal within each chunk; None without chunks."""


class XformersPagedAttention:
    """A `worker.attention.base.Attention` bound to one pool. Raises ValueError for what the kernel cannot do."""

    __slots__ = ("_cache", "_op", "_shape")

    name = "xformers"

    def __init__(self, shape: AttentionShape, cache: KVCache) -> None:
        if reason := unsupported(shape, cache.keys[0].dtype, cache.block_size):
            raise ValueError(f"xformers attention: {reason}")
        self._shape = shape
        self._cache = cache
        tile = min(_TILE, cache.block_size)
        self._op: Any = type("PagedSplitK", (triton_splitk.FwOp,), {"BLOCK_N": tile})

    def plan(self, spans: Sequence[Span]) -> _Plan:
        num_decodes = next((row for row, span in enumerate(spans) if span.num_tokens > 1), len(spans))
        chunks = spans[num_decodes:]
        rows: list[int] = []
        first = num_decodes
        for span in chunks:
            if span.start:
                rows += range(first, first + span.num_tokens)
            first += span.num_tokens
        resumed = [span for span in chunks if span.start]
        own = tuple(span.num_tokens for span in chunks)
        return _Plan(
            num_decodes=num_decodes,
            decodes=self._paged(
                slice(0, num_decodes), spans[:num_decodes], [span.stop for span in spans[:num_decodes]]
            ),
            prefixes=self._paged(to_device(rows, torch.int64, self._device), resumed, [span.start for span in resumed]),
            chunk_lens=own,
            own_bias=attn_bias.BlockDiagonalCausalMask.from_seqlens(own, device=self._device) if own else None,
        )

    def static_plan(self, num_rows: int, num_blocks: int) -> _Plan:
        """As `worker.runner.graphs` asks for it: the kernel reads lengths and tables from the device anew each time."""
        size = self._cache.block_size
        spans = [Span(num_blocks * size - 1, 1, [0] * num_blocks)] * num_rows
        decodes = self._paged(slice(0, num_rows), spans, [num_blocks * size] * num_rows)
        assert decodes is not None
        decodes.bias.k_seqinfo.seqlen.fill_(1)
        return _Plan(num_rows, decodes, None, (), None)

    def refill(self, plan: object, spans: Sequence[Span]) -> None:
        assert isinstance(plan, _Plan)
        assert plan.decodes is not None
        bias = plan.decodes.bias
        num_rows, width = bias.block_tables.shape
        tables = torch.zeros((num_rows, width), dtype=torch.int32)
        lengths = torch.ones(num_rows, dtype=torch.int32)
        for row, span in enumerate(spans):
            held = -(-span.stop // self._cache.block_size)
            tables[row, :held] = torch.tensor(span.block_table[:held], dtype=torch.int32)
            lengths[row] = span.stop
        bias.block_tables.copy_(to_device(tables, torch.int32, self._device))
        bias.k_seqinfo.seqlen.copy_(to_device(lengths, torch.int32, self._device))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        self._cache.write(layer, batch.slots, key, value)
        plan = batch.plan
        assert isinstance(plan, _Plan)
        shape = self._shape
        # (num_tokens, kv_heads, queries of a kv head, head_dim)
        grouped = query.reshape(len(query), shape.num_kv_heads, -1, shape.head_dim)
        outputs = []
        if plan.decodes is not None:
            outputs.append(self._over_pages(layer, grouped, plan.decodes, partial=False)[0])
        if plan.chunk_lens:
            own, own_lse = self._own(grouped[plan.num_decodes :], key, value, plan)
            if plan.prefixes is not None:
                earlier, earlier_lse = self._over_pages(layer, grouped, plan.prefixes, partial=True)
                assert earlier_lse is not None
                index = plan.prefixes.rows - plan.num_decodes  # type: ignore[operator]
                own[index] = merge_partials(own[index], own_lse[index], earlier, earlier_lse)
            outputs.append(own)
        return torch.cat(outputs).view(len(query), -1)

    def _over_pages(self, layer: int, grouped: Tensor, paged: _Paged, *, partial: bool) -> tuple[Tensor, Tensor | None]:
        """(rows, kv_heads, reps, head_dim) of attention without a mask over each row's pages; its lse when partial."""
        shape, queries = self._shape, grouped[paged.rows].unsqueeze(0)
        reps = queries.shape[3]
        # (1, num_blocks * block_size, kv_heads, reps, head_dim): no copy, each kv head stands for its queries
        keys, values = (
            pool[layer].view(1, -1, shape.num_kv_heads, 1, shape.head_dim).expand(-1, -1, -1, reps, -1)
            for pool in (self._cache.keys, self._cache.values)
        )
        inputs = Inputs(queries, keys, values, attn_bias=paged.bias, scale=shape.scale, is_partial=partial)
        out, context = self._op.apply(inputs, needs_gradient=partial)
        lse = context.lse[0].permute(2, 0, 1) if partial else None  # (kv_heads, reps, rows) -> rows first
        return out.reshape(queries.shape)[0], lse

    def _own(self, grouped: Tensor, key: Tensor, value: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
        """Causal attention of every chunk over itself -> (tokens, kv_heads, reps, head_dim) and its lse."""
        key, value = key[plan.num_decodes :], value[plan.num_decodes :]
        if grouped.is_cuda:
            reps = grouped.shape[2]
            keys, values = (states.unsqueeze(2).expand(-1, -1, reps, -1).unsqueeze(0) for states in (key, value))
            out, lse = fmha.memory_efficient_attention_partial(
                grouped.unsqueeze(0), keys, values, plan.own_bias, scale=self._shape.scale, op=flash.FwOp
            )
            return out[0], lse[0].permute(2, 0, 1)
        parts, first = [], 0
        for length in plan.chunk_lens:
            rows = slice(first, first + length)
            # (1, heads, tokens, head_dim)
            states = (part[rows].transpose(0, 1).unsqueeze(0) for part in (grouped.flatten(1, 2), key, value))
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *states, 0.0, True, scale=self._shape.scale
            )
            parts.append((out[0].transpose(0, 1), lse[0].transpose(0, 1)))
            first += length
        outs, lses = (torch.cat(column) for column in zip(*parts, strict=True))
        return outs.reshape(grouped.shape), lses.reshape(grouped.shape[:3])

    def _paged(self, rows: Tensor | slice, spans: Sequence[Span], kv_lens: Sequence[int]) -> _Paged | None:
        if not spans:
            return None
        size = self._cache.block_size
        width = max(-(-length // size) for length in kv_lens)
        tables = [list(span.block_table[:width]) for span in spans]
        bias = attn_bias.PagedBlockDiagonalPaddedKeysMask.from_seqlens(
            q_seqlen=[span.num_tokens for span in spans],
            kv_seqlen=list(kv_lens),
            block_tables=to_device([table + [0] * (width - len(table)) for table in tables], torch.int32, self._device),
            page_size=size,
            device=self._device,
        )
        return _Paged(rows, bias)

    @property
    def _device(self) -> torch.device:
        return self._cache.keys[0].device


def unsupported(shape: AttentionShape, dtype: torch.dtype, block_size: int) -> str | None:
    """Why this kernel cannot serve a model, or None."""
    if dtype not in DTYPES:
        return f"dtype {dtype} is neither float16 nor bfloat16"
    if shape.head_dim not in HEAD_DIMS:
        return f"head size {shape.head_dim} is none of {sorted(HEAD_DIMS)}"
    if any(window is not None for window in shape.windows):
        return "sliding windows are not supported"
    if block_size not in (16, 32) and block_size % _TILE:
        return f"block size {block_size} is neither 16, 32 nor a multiple of 64"
    return None
