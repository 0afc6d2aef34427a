"""Paged attention on a CPU in bfloat16 with the decodes compiled: pages are read where they lie, nothing is gathered.

Prefill chunks go through torch as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.attention.base import AttentionShape, ForwardBatch, Span
from worker.attention.kv_cache import KVCache
from worker.attention.torch_paged import Plan, TorchPagedAttention
from worker.kernels import bfloat16 as kernels
from worker.kernels.attention import AttentionKernel
from worker.kernels.bits import MAX_ROWS, bits


@dataclass(frozen=True, slots=True)
class _CompiledPlan(Plan):
    """Rows 0..num_decodes-1 of the batch."""

    num_decodes: int
    tables: NDArray[np.int64]
    """(num_decodes, width), padded with the null block"""
    bounds: NDArray[np.int64]
    """(num_decodes, 2): the first key that a row sees, and the one after the last"""


class CompiledPagedAttention(TorchPagedAttention):
    """A `worker.attention.base.Attention` bound to one pool in bfloat16 on a CPU."""

    __slots__ = ("_kernel", "_keys", "_values")

    name = "compiled"

    def __init__(self, shape: AttentionShape, cache: KVCache) -> None:
        super().__init__(shape, cache)
        self._kernel = AttentionKernel(shape.num_heads // shape.num_kv_heads, shape.head_dim)
        self._keys = [bits(pool) for pool in cache.keys]
        self._values = [bits(pool) for pool in cache.values]

    def _write(self, layer: int, batch: ForwardBatch, key: Tensor, value: Tensor) -> None:
        if len(key) > MAX_ROWS:
            super()._write(layer, batch, key, value)
        else:
            kernels.write(bits(key), bits(value), self._keys[layer], self._values[layer], batch.slots.numpy())

    def _plan(self, spans: Sequence[Span], window: int | None) -> Plan:
        num_decodes = next((row for row, span in enumerate(spans) if span.num_tokens > 1), len(spans))
        decodes = spans[:num_decodes]
        bounds = [(0 if window is None else max(0, span.stop - window), span.stop) for span in decodes]
        if not decodes:
            return super()._plan(spans, window)
        width = -(-decodes[-1].stop // self._cache.block_size)
        tables = np.zeros((num_decodes, width), np.int64)
        for row, span in enumerate(decodes):
            num_blocks = -(-span.stop // self._cache.block_size)
            tables[row, :num_blocks] = span.block_table[:num_blocks]
        chunks = self._plan_chunks(spans, num_decodes, window)
        return _CompiledPlan((), chunks, num_decodes, tables, np.array(bounds, np.int64))

    def _decode_all(self, layer: int, query: Tensor, plan: Plan) -> list[Tensor]:
        if not isinstance(plan, _CompiledPlan):
            return super()._decode_all(layer, query, plan)
        query = query[: plan.num_decodes]
        out = query.new_empty(plan.num_decodes, self._shape.num_heads * self._shape.head_dim)
        keys, values = self._keys[layer], self._values[layer]
        tables, bounds, num_threads = plan.tables, plan.bounds, torch.get_num_threads()
        self._kernel(bits(query), keys, values, tables, bounds, self._shape.scale, bits(out), num_threads=num_threads)
        return [out]
