"""Paged attention through xformers' kernels, for CUDA. The only module that imports xformers.

Decodes read their pages in place, through the Triton split-K kernel. They are padded to a few shapes (`DECODE_ROWS`,
`CONTEXTS`). Chunks go through flash attention together. For resumed chunks, all keys are first gathered from their
pages, which is cheap next to the attention itself.

    queries             |  d0 d1 d2 -  |  c0 c0 c0 c0  |  c1 c1 c1        |
    keys                   their pages    its own         |<- pages ->| c1 c1 c1      gathered: 0..stop-1
    kernel                 split-K        flash, causal   flash, causal from the bottom right

Source: docs of the kernel in xformers.ops.fmha.triton_splitk (v0.0.35). Its tile of keys must divide the page. For
pages of 16 and 32 tokens, a subclass has a smaller tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from xformers.ops.fmha import attn_bias, flash, triton_splitk
from xformers.ops.fmha.common import Inputs

from worker.attention.base import CONTEXTS, DECODE_ROWS, AttentionShape, ForwardBatch, Span, num_leading_decodes, padded
from worker.attention.kv_cache import KVCache
from worker.kernels.device import to_device

HEAD_DIMS: Final = frozenset({16, 32, 64, 128, 256})
DTYPES: Final = frozenset({torch.float16, torch.bfloat16})
MAX_GATHERED: Final = 1 << 16
"""Keys that are gathered at a time, unless one sequence has more: bounds the memory of many chunks."""
_TILE: Final = 64  # keys: the size that xformers assumes when it splits
_FULL: Final = 1024
"""About the number of programs that a GPU runs at once: up to it, more splits make a step shorter."""
_MAX_SPLITS: Final = 64  # bounds the partial results that are merged


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Rows first..stop-1 of the batch: chunks of one or more sequences."""

    first: int
    stop: int
    slots: Tensor | None
    """(keys,) int64: all tokens of each sequence up to the end of its chunk. None: the chunks start at 0."""
    bias: Any


@dataclass(frozen=True, slots=True)
class _XformersPlan:
    num_decodes: int
    decodes: Any
    """The bias of the decodes, padded to more rows; None without decodes."""
    chunks: tuple[_Chunks, ...]


class XformersPagedAttention:
    """A `worker.attention.base.Attention` bound to one pool. Raises ValueError if the kernel does not support it."""

    name = "xformers"

    def __init__(self, shape: AttentionShape, cache: KVCache) -> None:
        self._shape = shape
        self._cache = cache
        self._op: Any = _paged_split_k(min(_TILE, cache.block_size))

    def plan(self, spans: Sequence[Span]) -> _XformersPlan:
        num_decodes = num_leading_decodes(spans)
        decodes = None
        if num_decodes:
            longest = padded(max(span.stop for span in spans[:num_decodes]), CONTEXTS)
            decodes = self._decodes(padded(num_decodes, DECODE_ROWS), -(-longest // self._cache.block_size))
            self._fill(decodes, spans[:num_decodes])
        return _XformersPlan(num_decodes, decodes, tuple(self._plan_chunks(spans[num_decodes:], num_decodes)))

    def static_plan(self, num_rows: int, num_blocks: int) -> _XformersPlan:
        """See `worker.runner.graphs`. Each replay reads lengths and tables from the device."""
        return _XformersPlan(num_rows, self._decodes(num_rows, num_blocks), ())

    def refill(self, plan: object, spans: Sequence[Span]) -> None:
        assert isinstance(plan, _XformersPlan)
        self._fill(plan.decodes, spans)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        self._cache.write(layer, batch.slots, key, value, query)
        plan = batch.plan
        assert isinstance(plan, _XformersPlan)
        shape = self._shape
        # (num_tokens, kv_heads, queries of a kv head, head_dim)
        grouped = query.reshape(len(query), shape.num_kv_heads, -1, shape.head_dim)
        outputs = []
        if plan.decodes is not None:
            outputs.append(self._over_pages(layer, grouped[: plan.num_decodes], plan.decodes))
        for chunks in plan.chunks:
            rows = slice(chunks.first, chunks.stop)
            keys, values = key[rows], value[rows]
            if chunks.slots is not None:
                keys, values = (
                    pool[layer].flatten(0, 1).index_select(0, chunks.slots)
                    for pool in (self._cache.keys, self._cache.values)
                )
            outputs.append(self._flash(grouped[rows], keys, values, chunks.bias))
        attended = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return attended.reshape(len(query), -1)

    def _over_pages(self, layer: int, queries: Tensor, bias: Any) -> Tensor:
        """Attend to each row's pages without a mask -> (rows, kv_heads, group_size, head_dim)."""
        shape, (num_rows, _, group_size, _) = self._shape, queries.shape
        if missing := len(bias.block_tables) - num_rows:
            queries = functional.pad(queries, (0, 0, 0, 0, 0, 0, 0, missing))
        # (1, num_blocks * block_size, kv_heads, group_size, head_dim): no copy, each kv head stands for its queries
        keys, values = (
            pool[layer].view(1, -1, shape.num_kv_heads, 1, shape.head_dim).expand(-1, -1, -1, group_size, -1)
            for pool in (self._cache.keys, self._cache.values)
        )
        inputs = Inputs(queries.unsqueeze(0), keys, values, attn_bias=bias, scale=shape.scale)
        out: Tensor = self._op.apply(inputs, needs_gradient=False)[0]
        return out.reshape(queries.shape)[:num_rows]

    def _flash(self, queries: Tensor, keys: Tensor, values: Tensor, bias: Any) -> Tensor:
        """Attend causally within each sequence of `bias` -> (tokens, kv_heads, group_size, head_dim)."""
        group_size = queries.shape[2]
        keys, values = (states.unsqueeze(2).expand(-1, -1, group_size, -1).unsqueeze(0) for states in (keys, values))
        inputs = Inputs(queries.unsqueeze(0), keys, values, attn_bias=bias, scale=self._shape.scale)
        out: Tensor = flash.FwOp.apply(inputs, needs_gradient=False)[0]
        return out[0]

    def _decodes(self, num_rows: int, num_blocks: int) -> Any:
        """Return the bias of decodes over at most `num_blocks` blocks each. All see the null block's first token."""
        size = self._cache.block_size
        bias = attn_bias.PagedBlockDiagonalPaddedKeysMask.from_seqlens(
            q_seqlen=[1] * num_rows,
            kv_seqlen=[num_blocks * size] * num_rows,
            block_tables=torch.zeros((num_rows, num_blocks), dtype=torch.int32, device=self._cache.device),
            page_size=size,
            device=self._cache.device,
        )
        bias.k_seqinfo.seqlen.fill_(1)
        return bias

    def _fill(self, bias: Any, spans: Sequence[Span]) -> None:
        """Set the first rows to these decodes. The others see the null block's first token.

        Table entries beyond a row's last block are never read.
        """
        width = -(-max(span.stop for span in spans) // self._cache.block_size)
        tables = np.zeros((len(bias.block_tables), width), dtype=np.int32)
        lengths = np.ones(len(tables), dtype=np.int32)
        for row, span in enumerate(spans):
            if row and span.block_table is spans[row - 1].block_table:  # of a chunk: converting a table takes 10 us
                tables[row] = tables[row - 1]
            else:
                table = span.block_table[:width]
                tables[row, : len(table)] = table
            lengths[row] = span.stop
        bias.block_tables[:, :width].copy_(to_device(torch.from_numpy(tables), torch.int32, self._cache.device))
        bias.k_seqinfo.seqlen.copy_(to_device(torch.from_numpy(lengths), torch.int32, self._cache.device))

    def _plan_chunks(self, spans: Sequence[Span], first: int) -> Iterator[_Chunks]:
        for is_resumed, run in groupby(spans, key=lambda span: span.start > 0):
            for part in _runs_that_fit(list(run)) if is_resumed else [list(run)]:
                stop = first + sum(span.num_tokens for span in part)
                bias = attn_bias.BlockDiagonalCausalFromBottomRightMask.from_seqlens(
                    [span.num_tokens for span in part], [span.stop for span in part], device=self._cache.device
                )
                yield _Chunks(first, stop, self._slots(part) if is_resumed else None, bias)
                first = stop

    def _slots(self, spans: Sequence[Span]) -> Tensor:
        size = self._cache.block_size
        parts = []
        for span in spans:
            blocks = np.asarray(span.block_table[: -(-span.stop // size)], dtype=np.int64)
            parts.append((blocks[:, None] * size + np.arange(size)).reshape(-1)[: span.stop])
        return to_device(torch.from_numpy(np.concatenate(parts)), torch.int64, self._cache.device)


def _runs_that_fit(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Cut spans into runs of at most MAX_GATHERED keys, or of one span with more."""
    part: list[Span] = []
    for span in spans:
        if part and sum(each.stop for each in part) + span.stop > MAX_GATHERED:
            yield part
            part = []
        part.append(span)
    yield part


def _paged_split_k(tile: int) -> Any:
    """Return xformers' kernel with a tile of `tile` keys."""

    class PagedSplitK(triton_splitk.FwOp):  # type: ignore[misc]
        BLOCK_N = tile
        MAX_BLOCK_M = 1
        """Room for the partial results of one query per row; xformers' default is 32."""

        @classmethod
        def get_split_k(cls, B: int, G: int, H: int, Mk: int, *rest: Any, **options: Any) -> int:
            """Double the splits of xformers, which assumes tiles of 64, until the GPU is busy."""
            num_splits: int = super().get_split_k(B, G, H, Mk, *rest, **options)
            while 2 * num_splits <= min(_MAX_SPLITS, _FULL // (B * G * H), Mk // tile):
                num_splits *= 2
            return num_splits

    return PagedSplitK


def unsupported(shape: AttentionShape, dtype: torch.dtype, block_size: int) -> str | None:
    """Return why this kernel cannot serve a model, or None."""
    if dtype not in DTYPES:
        return f"dtype {dtype} is neither float16 nor bfloat16"
    if shape.head_dim not in HEAD_DIMS:
        return f"head size {shape.head_dim} is none of {sorted(HEAD_DIMS)}"
    if any(window is not None for window in shape.windows):
        return "sliding windows are not supported"
    if block_size not in (16, 32) and block_size % _TILE:
        return f"block size {block_size} is neither 16, 32 nor a multiple of 64"
    return None
