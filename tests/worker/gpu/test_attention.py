"""Every attention of a GPU gives what torch's gives in float32 on the CPU, over pages at random places."""

from __future__ import annotations

import random

import pytest
import torch

from benchmarks.gpu import interpreter
from worker.attention.base import AttentionShape, ForwardBatch, Span
from worker.attention.kv_cache import KVCache
from worker.attention.selector import select_attention
from worker.attention.torch_paged import TorchPagedAttention
from worker.attention.xformers_paged import HEAD_DIMS, XformersPagedAttention

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""For inputs of size 1: some roundings of the output, whose largest entries are near 4."""
STEPS = {
    "mixed": [(7, 1), (33, 1), (70, 1), (0, 6), (33, 7), (0, 2), (64, 3), (10, 30), (5, 2)],
    "prompts": [(0, 5), (0, 17), (0, 1)][:2],
    "chunks": [(16, 5), (37, 9)],
}
SHAPES = [(4, 4, 16), (4, 2, 32), (9, 3, 64), (6, 2, 80), (8, 2, 128), (4, 1, 256)]
"""Heads, KV heads and their size; xformers has no kernel for 80."""


def difference(
    steps: list[list[tuple[int, int]]],
    shape: AttentionShape,
    block_size: int,
    dtype: torch.dtype,
    device: str,
    kind: type | None = None,
) -> float:
    """Return the largest deviation over steps of (start, number of tokens), decodes first and by context."""
    generator = torch.Generator().manual_seed(block_size + shape.head_dim)
    num_blocks = 1 + max(sum(-(-sum(part) // block_size) for part in spans) for spans in steps)
    reference = KVCache(shape, num_blocks, block_size, torch.float32, torch.device("cpu"))
    cache = KVCache(shape, num_blocks, block_size, dtype, torch.device(device))
    for name in ("keys", "values"):
        filled = torch.randn(getattr(reference, name)[0].shape, generator=generator).to(dtype)
        getattr(reference, name)[0].copy_(filled)
        getattr(cache, name)[0].copy_(filled)
    attention = select_attention(shape, cache, deterministic=False) if kind is None else kind(shape, cache)
    is_paged = kind is None and not shape.windows and shape.head_dim in HEAD_DIMS
    assert isinstance(attention, XformersPagedAttention) == is_paged
    exact, worst = TorchPagedAttention(shape, reference), 0.0
    for step in steps:
        free = random.Random(0).sample(range(1, num_blocks), num_blocks - 1)
        spans = [
            Span(start, length, [free.pop() for _ in range(-(-(start + length) // block_size))])
            for start, length in step
        ]
        slots = [
            span.block_table[i // block_size] * block_size + i % block_size
            for span in spans
            for i in range(span.start, span.stop)
        ]
        sizes = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        states = [torch.randn(len(slots), heads, shape.head_dim, generator=generator).to(dtype) for heads in sizes]
        where, empty = torch.tensor(slots), torch.empty(0)
        want = TorchPagedAttention.attend(
            exact, 0, *(part.float() for part in states), ForwardBatch(empty, empty, where, exact.plan(spans))
        )
        batch = ForwardBatch(empty, empty, where.to(device), attention.plan(spans))
        got = attention.attend(0, *(part.to(device) for part in states), batch)
        worst = max(worst, float((got.float().cpu() - want).abs().max()))
    return worst


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_it_equals_the_reference(
    device: str, heads: tuple[int, int, int], dtype: torch.dtype, block_size: int, window: int | None
) -> None:
    shape = AttentionShape(1, *heads, heads[2] ** -0.5, () if window is None else (window,))
    assert difference(list(STEPS.values()), shape, block_size, dtype, device) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [None, 9])
def test_the_backend_in_torch_runs_there_too(device: str, window: int | None) -> None:
    shape = AttentionShape(1, 8, 2, 128, 128**-0.5, () if window is None else (window,))
    worst = difference(list(STEPS.values()), shape, 16, torch.bfloat16, device, TorchPagedAttention)
    assert worst < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("num_rows", [1, 8, 64])
@pytest.mark.parametrize("length", [2047, 16383, 40000])
def test_long_contexts_of_a_large_model(device: str, length: int, num_rows: int) -> None:
    """Decodes of Llama 8B's shape; a step of the interpreter is shorter and smaller."""
    heads = (32, 8, 128)
    if interpreter.is_on():
        length, num_rows, heads = length // 256, min(num_rows, 8), (4, 1, 128)
    elif length * num_rows > 300_000:
        pytest.skip("the reference on the CPU would take minutes")
    shape = AttentionShape(1, *heads, heads[2] ** -0.5)
    steps = [[(length - row, 1) for row in reversed(range(num_rows))], [(length // 2, 200 if length > 200 else 20)]]
    assert difference(steps, shape, 16, torch.bfloat16, device) < TOLERANCE[torch.bfloat16]
