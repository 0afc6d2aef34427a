"""Run by test_xformers_paged.py in its own process: xformers' kernel in Triton's interpreter against torch's.

Prints one JSON object: the largest absolute difference of each case, and how often Triton would have compiled.
"""

from __future__ import annotations

import json
import random
from typing import Any

import torch
import triton.language as tl
from xformers.ops.fmha import triton_splitk
from xformers.ops.fmha._triton.splitk_kernels import _fwd_kernel_splitK

from benchmarks.gpu import interpreter
from tests.worker.gpu.fused import fused_differences
from worker.attention import xformers_paged
from worker.attention.base import AttentionShape, ForwardBatch, Span
from worker.attention.kv_cache import KVCache
from worker.attention.torch_paged import TorchPagedAttention
from worker.attention.xformers_paged import XformersPagedAttention

interpreter.install_attention()

CASES = {
    "decode": [(49, 1), (16, 1), (0, 1), (99, 1)],
    "whole prompts": [(0, 5), (0, 17)],
    "chunks": [(16, 5), (37, 9)],
    "mixed": [(7, 1), (70, 1), (0, 6), (33, 7), (0, 2), (64, 3), (10, 30), (5, 2)],
    "three decodes": [(7, 1), (10, 1), (70, 1)],
}


def difference(case: list[tuple[int, int]], block_size: int, num_heads: int, num_kv_heads: int) -> float:
    generator = torch.Generator().manual_seed(block_size + num_heads)
    shape = AttentionShape(2, num_heads, num_kv_heads, 32, 0.2)
    kernels = []
    for kind in (TorchPagedAttention, XformersPagedAttention):
        dtype = torch.float32 if kind is TorchPagedAttention else torch.float16
        kernels.append((kind, KVCache(shape, 40, block_size, dtype, torch.device("cpu"))))
    for pool in ("keys", "values"):
        filled = torch.randn(40, block_size, num_kv_heads, 32, generator=generator)
        for _, cache in kernels:
            getattr(cache, pool)[1].copy_(filled.half())
    free = random.Random(0).sample(range(1, 40), 39)
    spans = []
    for start, length in case:
        count = -(-(start + length) // block_size)
        table, free = free[:count], free[count:]
        spans.append(Span(start, length, table))
    total = sum(length for _, length in case)
    query = torch.randn(total, num_heads, 32, generator=generator).half()
    key, value = (torch.randn(total, num_kv_heads, 32, generator=generator).half() for _ in range(2))
    slots = [
        span.block_table[i // block_size] * block_size + i % block_size
        for span in spans
        for i in range(span.start, span.stop)
    ]
    outputs = []
    for kind, cache in kernels:
        attention = kind(shape, cache)
        dtype = cache.keys[0].dtype
        empty = torch.empty(0)
        batch = ForwardBatch(empty, empty, torch.tensor(slots), attention.plan(spans))
        outputs.append(attention.attend(1, query.to(dtype), key.to(dtype), value.to(dtype), batch).float())
    return float((outputs[0] - outputs[1]).abs().max())


def static_difference(block_size: int) -> float:
    """Compare a plan of fixed shape, filled twice, with a plan made for the step."""
    generator = torch.Generator().manual_seed(block_size)
    shape = AttentionShape(1, 4, 2, 32, 0.2)
    cache = KVCache(shape, 40, block_size, torch.float16, torch.device("cpu"))
    for pool in (cache.keys, cache.values):
        pool[0].copy_(torch.randn(pool[0].shape, generator=generator).half())
    attention = XformersPagedAttention(shape, cache)
    query, key, value = (torch.randn(4, heads, 32, generator=generator).half() for heads in (4, 2, 2))
    empty, worst = torch.empty(0), 0.0
    static = attention.static_plan(4, 5)
    for starts in ([3, 70, block_size], [0, 5 * block_size - 1]):
        spans = [Span(start, 1, [7 * row + 1 + place for place in range(6)]) for row, start in enumerate(starts)]
        slots = [span.block_table[span.start // block_size] * block_size + span.start % block_size for span in spans]
        num_rows = len(spans)
        attention.refill(static, spans)
        batch = ForwardBatch(empty, empty, torch.tensor(slots + [0] * (4 - num_rows)), static)
        got = attention.attend(0, query, key, value, batch)[:num_rows]
        batch = ForwardBatch(empty, empty, torch.tensor(slots), attention.plan(spans))
        want = attention.attend(0, *(part[:num_rows] for part in (query, key, value)), batch)
        worst = max(worst, float((got - want).abs().max()))
    return worst


def num_compilations(num_steps: int) -> int:
    """Return the sets of constants that steps of 1 to 8 decodes, most with chunks, give to the kernel."""
    shape = AttentionShape(1, 8, 2, 32, 0.2)
    cache = KVCache(shape, 300, 16, torch.float16, torch.device("cpu"))
    attention = XformersPagedAttention(shape, cache)
    constants = [name for name, kind in _fwd_kernel_splitK.fn.__annotations__.items() if kind is tl.constexpr]
    seen: set[tuple[object, ...]] = set()

    class Kernel:
        def __getitem__(self, grid: object) -> Any:
            return lambda **given: seen.add(tuple(given.get(name) for name in constants))

    draw = random.Random(0)
    theirs, merge = triton_splitk.FwOp.get_kernel, triton_splitk.merge_attentions
    triton_splitk.FwOp.get_kernel = classmethod(lambda cls: Kernel())
    triton_splitk.merge_attentions = lambda *parts: None
    for _ in range(num_steps):
        starts = sorted(draw.randrange(2000) for _ in range(draw.randint(1, 8)))
        spans = [Span(start, 1, [1] * 126) for start in starts]
        spans += [Span(draw.randrange(500), draw.randint(2, 300), [2] * 51) for _ in range(draw.randint(0, 2))]
        num_tokens = sum(span.num_tokens for span in spans)
        query, key, value = (torch.zeros(num_tokens, heads, 32, dtype=torch.float16) for heads in (8, 2, 2))
        slots = torch.zeros(num_tokens, dtype=torch.int64)
        attention.attend(0, query, key, value, ForwardBatch(slots, slots, slots, attention.plan(spans)))
    triton_splitk.FwOp.get_kernel, triton_splitk.merge_attentions = theirs, merge
    return len(seen)


if __name__ == "__main__":
    compilations = num_compilations(40)
    xformers_paged.CONTEXTS, xformers_paged.MAX_GATHERED = (48, 160), 80  # so that few programs run, and chunks part
    shapes = [(16, 4, 2), (32, 2, 2), (64, 6, 2)]
    found = {
        f"{name}, blocks of {size}, {heads}/{kv_heads} heads": difference(case, size, heads, kv_heads)
        for size, heads, kv_heads in shapes
        for name, case in CASES.items()
    }
    found |= {f"static plan, blocks of {size}": static_difference(size) for size in (16, 32)}
    found |= fused_differences(32, 4, 2) | fused_differences(80, 9, 9)
    print(json.dumps({"differences": found, "compilations": compilations}))
