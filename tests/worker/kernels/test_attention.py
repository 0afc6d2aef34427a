"""The compiled attention against the same mathematics in torch's float32."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.worker.families import write_family
from tests.worker.kernels.rounding import HALF_STEP, close, states
from tests.worker.paged import PagedModel
from worker.attention.base import AttentionShape, ForwardBatch, Span
from worker.attention.kv_cache import KVCache
from worker.attention.selector import select_attention
from worker.attention.tiled_paged import TiledPagedAttention
from worker.attention.torch_paged import TorchPagedAttention
from worker.kernels.cpu import AttentionKernel, Decodes, Kernels
from worker.model.load import LoadOptions, load_model


def pool(shape: AttentionShape, block_size: int, dtype: torch.dtype = torch.bfloat16) -> KVCache:
    cache = KVCache(shape, 40, block_size, dtype, torch.device("cpu"))
    for seed, layer in enumerate((*cache.keys, *cache.values)):
        layer.copy_(states(*layer.shape, seed=seed))
    return cache


def batch_of(spans: list[Span], block_size: int, plan: object) -> ForwardBatch:
    slots = [
        span.block_table[position // block_size] * block_size + position % block_size
        for span in spans
        for position in range(span.start, span.stop)
    ]
    rows = torch.tensor(slots)
    return ForwardBatch(rows, rows, rows, plan)


IN_TORCH = partial(TiledPagedAttention, chunks_in_torch=True)
KINDS = pytest.mark.parametrize("kind", [TiledPagedAttention, IN_TORCH])


@KINDS
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(4, 4, 16, 4), (6, 2, 16, 16), (9, 3, 64, 16), (8, 2, 80, 32), (14, 2, 64, 1), (5, 1, 100, 300), (2, 2, 16, 16)],
)
def test_it_equals_torch_over_scattered_pages(
    kernels: Kernels, kind: Any, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, window: int | None
) -> None:
    shape = AttentionShape(1, num_heads, num_kv_heads, head_dim, 0.3, (window,))
    starts = [0, 1, 2, block_size - 1, block_size, 2 * block_size + 3]
    blocks = torch.randperm(39, generator=torch.Generator().manual_seed(5)).add(1).tolist()
    spans = [Span(start, 1, [blocks.pop() for _ in range(start // block_size + 1)]) for start in starts]
    spans.append(Span(block_size + 1, 5, [blocks.pop() for _ in range(-(-(block_size + 6) // block_size))]))
    num_tokens = sum(span.num_tokens for span in spans)
    # as the decoder hands them over: parts of one product
    fused = states(num_tokens, num_heads + 2 * num_kv_heads, head_dim, seed=9)
    query, key, value = fused.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        cache = pool(shape, block_size, dtype)
        attention = TorchPagedAttention(shape, cache) if dtype == torch.float32 else kind(shape, cache, kernels)
        batch = batch_of(spans, block_size, attention.plan(spans))
        outputs.append(attention.attend(0, query.to(dtype), key.to(dtype), value.to(dtype), batch))
        for states_of, pools in ((key, cache.keys), (value, cache.values)):
            assert torch.equal(pools[0].flatten(0, 1)[batch.slots].bfloat16(), states_of)
    want, got = outputs
    compiled = slice(None) if kind is TiledPagedAttention else slice(len(starts))
    assert bool(((got.float() - want).abs() <= HALF_STEP * (want.abs() + 1e-3))[compiled].all())
    assert torch.allclose(got.float(), want, atol=0.03)


def test_many_keys_and_far_scores_stay_exact(kernels: Kernels) -> None:
    shape = AttentionShape(1, 1, 1, 16, 1.0)
    cache = KVCache(shape, 300, 4, torch.bfloat16, torch.device("cpu"))
    cache.keys[0].copy_(60 * states(*cache.keys[0].shape, seed=1))
    cache.values[0].copy_(states(*cache.values[0].shape, seed=2))
    spans = [Span(1100, 1, list(range(1, 277)))]
    query, own = states(1, 1, 16, seed=3), states(1, 1, 16, seed=4)
    attention = TiledPagedAttention(shape, cache, kernels)
    got = attention.attend(0, query, own, own, batch_of(spans, 4, attention.plan(spans)))
    keys, values = (p[0].flatten(0, 1)[4:1105, 0].float() for p in (cache.keys, cache.values))
    want = (keys @ query[0, 0].float()).softmax(0) @ values
    assert close(got[0], want, steps=1.1)


@pytest.mark.parametrize("num_rows", [1, 2, 40])
def test_the_number_of_threads_changes_no_bit(kernels: Kernels, num_rows: int) -> None:
    query, key, value = (states(num_rows, num_heads, 16, seed=num_heads) for num_heads in (6, 2, 2))
    tables = np.array([[1 + row, *range(41, 82)] for row in range(num_rows)])[:, ::-1].copy()
    bounds = np.array([[row % 3, 4 * 42 - row % 4] for row in range(num_rows)])
    outs = [torch.zeros(num_rows, 96, dtype=torch.bfloat16) for _ in range(3)]
    kernel = AttentionKernel(kernels, num_heads=6, num_kv_heads=2, head_dim=16, scale=0.2, block_size=4)
    before = torch.get_num_threads()
    try:
        for num_threads, out in enumerate(outs, 1):
            torch.set_num_threads(num_threads)
            pages = states(82, 4, 2, 16, seed=3)
            kernel((query, key, value + 1), pages, pages.clone(), Decodes(tables, bounds), out)
    finally:
        torch.set_num_threads(before)
    assert outs[0].count_nonzero() == outs[0].numel()
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_heads_may_lie_apart(kernels: Kernels, num_kv_heads: int) -> None:
    """As many models of transformers have them: (heads, rows, head_dim)."""
    kernel = AttentionKernel(
        kernels, num_heads=3 * num_kv_heads, num_kv_heads=num_kv_heads, head_dim=16, scale=0.2, block_size=4
    )
    apart = tuple(states(heads, 5, 16).transpose(0, 1) for heads in (3 * num_kv_heads, num_kv_heads, num_kv_heads))
    decodes = Decodes(np.arange(1, 6).reshape(5, 1), np.array([[0, 3]] * 5))
    outs = []
    for given in (apart, tuple(one.clone(memory_format=torch.contiguous_format) for one in apart)):
        keys, values = (states(6, 4, num_kv_heads, 16, seed=seed) for seed in (1, 2))
        out = states(5, 48 * num_kv_heads)
        kernel(given, keys, values, decodes, out)
        outs.append((out, keys, values))
    assert all(torch.equal(one, other) for one, other in zip(*outs, strict=True))


@pytest.mark.parametrize(("head_dim", "name"), [(16, "tiled"), (15, "torch"), (6, "torch")])
def test_heads_that_do_not_fill_a_vector_go_through_torch(
    head_dim: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.attention.selector.has_amx", lambda: False)
    shape = AttentionShape(1, 6, 2, head_dim, 0.2)
    cache = KVCache(shape, 2, 4, torch.bfloat16, torch.device("cpu"))
    assert select_attention(shape, cache, deterministic=False).name == name


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_not_finite_is_never_hidden(kernels: Kernels, broken: float) -> None:
    shape = AttentionShape(1, 2, 1, 16, 0.5)
    cache = pool(shape, 4)
    cache.keys[0][2, 1, 0, 0] = broken
    attention = TiledPagedAttention(shape, cache, kernels)
    spans = [Span(2, 1, [1]), Span(6, 1, [3, 2])]
    query, own = states(2, 2, 16), states(2, 1, 16)
    got = attention.attend(0, query, own, own, batch_of(spans, 4, attention.plan(spans)))
    assert bool(got[0].isfinite().all())
    assert bool(got[1].isnan().all())


@KINDS
@pytest.mark.parametrize(
    "name", ["llama3", *(pytest.param(name, marks=pytest.mark.e2e) for name in ("qwen3", "mistral_window"))]
)
def test_a_bfloat16_model_is_as_near_to_the_reference_as_torch(
    kernels: Kernels, kind: Any, name: str, tmp_path: Path
) -> None:
    """A model in bfloat16 is as near to the reference as the one in torch."""
    reference = write_family(name, tmp_path)
    attention = partial(kind, kernels=kernels)
    model = load_model(str(tmp_path), LoadOptions(dtype="bfloat16"))
    errors = [0.0, 0.0]
    for seed in range(6):  # one prompt is too few: roundings add up over the layers
        ids = torch.randint(0, 99, (40,), generator=torch.Generator().manual_seed(seed)).tolist()
        with torch.inference_mode():
            want = reference(torch.tensor([ids])).logits[0]
        for index, each in enumerate((attention, TorchPagedAttention)):
            got = PagedModel(model, attention=each).chunked(ids, [20, 1])
            errors[index] += float((got - want).abs().mean())
    assert errors[0] < 1.1 * errors[1]


def test_chunks_use_amx_through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.attention.selector.has_amx", lambda: True)
    shape = AttentionShape(1, 6, 2, 16, 0.2)
    cache = KVCache(shape, 2, 4, torch.bfloat16, torch.device("cpu"))
    assert select_attention(shape, cache, deterministic=False).name == "compiled"
    assert select_attention(shape, cache, deterministic=True).name == "tiled"
