"""Paged attention in bfloat16 on a CPU with AMX: decodes run in a compiled kernel, which reads the pages in place.

Prefill chunks run in torch, whose products use AMX.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.attention.base import AttentionShape, ForwardBatch, Span, num_leading_decodes
from worker.attention.kv_cache import KVCache
from worker.attention.tiled_paged import make_kernel, plan_decodes
from worker.attention.torch_paged import PagedPlan, TorchPagedAttention
from worker.kernels.cpu import Decodes, Kernels


@dataclass(frozen=True, slots=True)
class _CompiledPlan(PagedPlan):
    """A plan without `decodes`: rows 0..num_rows-1 of the batch are `compiled`."""

    compiled: Decodes


class CompiledPagedAttention(TorchPagedAttention):
    """A `worker.attention.base.Attention` bound to one pool in bfloat16 on a CPU."""

    name = "compiled"

    def __init__(self, shape: AttentionShape, cache: KVCache, kernels: Kernels) -> None:
        super().__init__(shape, cache)
        self._kernel = make_kernel(shape, cache, kernels)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        plan: _CompiledPlan = batch.plan[self._shape.window(layer)]  # type: ignore[index]
        num_decodes, outputs = plan.compiled.num_rows, []
        if plan.chunks:
            chunks = slice(num_decodes, None)
            self._cache.write(layer, batch.slots[chunks], key[chunks], value[chunks])
        if num_decodes:
            states = (query[:num_decodes], key[:num_decodes], value[:num_decodes])
            out = query.new_empty(num_decodes, self._shape.num_heads * self._shape.head_dim)
            self._kernel(states, self._cache.keys[layer], self._cache.values[layer], plan.compiled, out)
            outputs.append(out)
        outputs += [self._prefill(layer, query, key, value, chunk) for chunk in plan.chunks]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _plan(self, spans: Sequence[Span], window: int | None) -> PagedPlan:
        num_decodes = num_leading_decodes(spans)
        compiled = plan_decodes(spans[:num_decodes], window, self._cache.block_size)
        return _CompiledPlan((), self._plan_chunks(spans, num_decodes, window), compiled)
