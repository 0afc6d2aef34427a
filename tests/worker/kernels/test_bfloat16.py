"""The compiled kernels against the same mathematics in torch's float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.worker.families import write_family
from tests.worker.paged import PagedModel
from worker.attention.base import AttentionShape, ForwardBatch, Span
from worker.attention.compiled_paged import CompiledPagedAttention
from worker.attention.kv_cache import KVCache
from worker.attention.torch_paged import TorchPagedAttention
from worker.kernels import bfloat16 as kernels
from worker.kernels.bits import MAX_ROWS, bits
from worker.model.load import LoadOptions, load_model
from worker.model.norm import CompiledRmsNorm
from worker.model.rope import CompiledRope, PlainRope

HALF_STEP = 2.0**-8
"""A bfloat16 has 8 bits: rounding to the nearest moves it by no more than this part of itself."""


@pytest.fixture(autouse=True)
def _kernels_at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.attention.compiled_paged._MAX_KEYS", 1 << 40)


def close(got: Tensor, want: Tensor, steps: float = 1.0) -> bool:
    """Whether bfloat16 `got` is float32 `want`, rounded, give or take float32's own last bits."""
    return bool(((got.float() - want).abs() <= steps * HALF_STEP * want.abs() + 4e-6).all())


def states(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("num_rows", [1, 7, MAX_ROWS, MAX_ROWS + 1])
def test_norm_is_rounded_once(num_rows: int) -> None:
    x, weight, eps = states(num_rows, 72), states(72, seed=1), 1e-5
    x[0] *= 1e-3  # where eps counts
    wide = x.float()
    want = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    assert close(CompiledRmsNorm(weight, eps)(x), want)


@pytest.mark.parametrize("head_dim", [8, 64])
def test_rotation_turns_its_heads_and_no_other(head_dim: int) -> None:
    table, positions = states(50, 2, head_dim, seed=2), torch.tensor([3, 0, 49])
    x = states(3, 6 * head_dim)
    want = PlainRope(table.float()).at(positions)(x.float(), 4)
    rest = x[:, 4 * head_dim :].clone()
    got = CompiledRope(table).at(positions)(x, 4)
    assert got.shape == (3, 4, head_dim)
    assert close(got, want)
    assert torch.equal(x[:, 4 * head_dim :], rest)


def pool(shape: AttentionShape, block_size: int) -> KVCache:
    cache = KVCache(shape, 40, block_size, torch.bfloat16, torch.device("cpu"))
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


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "block_size"), [(4, 4, 4), (6, 2, 16), (5, 1, 4)])
def test_attention_equals_torch_over_scattered_pages(
    num_heads: int, num_kv_heads: int, block_size: int, window: int | None
) -> None:
    shape = AttentionShape(1, num_heads, num_kv_heads, 16, 0.3, (window,))
    starts = [0, 1, 2, block_size - 1, block_size, 2 * block_size + 3]
    blocks = torch.randperm(39, generator=torch.Generator().manual_seed(5)).add(1).tolist()
    spans = [Span(start, 1, [blocks.pop() for _ in range(start // block_size + 1)]) for start in starts]
    spans.append(Span(block_size + 1, 5, [blocks.pop() for _ in range(-(-(block_size + 6) // block_size))]))
    num_tokens = sum(span.num_tokens for span in spans)
    # as the decoder hands them over: parts of one product
    fused = states(num_tokens, num_heads + 2 * num_kv_heads, 16, seed=9)
    query, key, value = fused.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        cache = pool(shape, block_size)
        if dtype == torch.float32:
            cache.keys, cache.values = [k.float() for k in cache.keys], [v.float() for v in cache.values]
        attention = (TorchPagedAttention if dtype == torch.float32 else CompiledPagedAttention)(shape, cache)
        batch = batch_of(spans, block_size, attention.plan(spans))
        outputs.append(attention.attend(0, query.to(dtype), key.to(dtype), value.to(dtype), batch))
        for states_of, pools in ((key, cache.keys), (value, cache.values)):
            assert torch.equal(pools[0].flatten(0, 1)[batch.slots].bfloat16(), states_of)
    want, got = outputs
    num_decodes = len(starts)
    assert bool(
        ((got[:num_decodes].float() - want[:num_decodes]).abs() <= HALF_STEP * (want[:num_decodes].abs() + 1e-3)).all()
    )
    assert torch.allclose(got.float(), want, atol=0.03)


def test_many_keys_and_far_scores_stay_exact() -> None:
    shape = AttentionShape(1, 1, 1, 8, 1.0)
    cache = KVCache(shape, 300, 4, torch.bfloat16, torch.device("cpu"))
    cache.keys[0].copy_(60 * states(*cache.keys[0].shape, seed=1))
    cache.values[0].copy_(states(*cache.values[0].shape, seed=2))
    spans = [Span(1100, 1, list(range(1, 277)))]
    query, own = states(1, 1, 8, seed=3), states(1, 1, 8, seed=4)
    attention = CompiledPagedAttention(shape, cache)
    got = attention.attend(0, query, own, own, batch_of(spans, 4, attention.plan(spans)))
    keys, values = (p[0].flatten(0, 1)[4:1105, 0].float() for p in (cache.keys, cache.values))
    want = (keys @ query[0, 0].float()).softmax(0) @ values
    assert close(got[0], want, steps=1.1)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_not_finite_is_never_hidden(broken: float) -> None:
    x = states(2, 16)
    x[1, 3] = broken
    out = torch.empty_like(x)
    kernels.rms_norm(bits(x), torch.ones(16).numpy(), 1e-5, bits(out))
    assert bool(out[0].isfinite().all())
    assert not bool(out[1].isfinite().all())
    shape = AttentionShape(1, 2, 1, 8, 0.5)
    cache = pool(shape, 4)
    cache.keys[0][2, 1, 0, 0] = broken
    attention = CompiledPagedAttention(shape, cache)
    spans = [Span(2, 1, [1]), Span(6, 1, [3, 2])]
    query, own = states(2, 2, 8), states(2, 1, 8)
    got = attention.attend(0, query, own, own, batch_of(spans, 4, attention.plan(spans)))
    assert bool(got[0].isfinite().all())
    assert bool(got[1].isnan().all())


@pytest.mark.parametrize("name", ["llama3", "qwen3", "mistral_window"])
def test_a_model_in_bfloat16_is_as_near_to_the_reference_as_torch_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = write_family(name, tmp_path)
    ids = [i * 7 % 99 for i in range(40)]
    with torch.inference_mode():
        want = reference(torch.tensor([ids])).logits[0]
    compiled = load_model(str(tmp_path), LoadOptions(dtype="bfloat16"))
    got = PagedModel(compiled, attention=CompiledPagedAttention).chunked(ids, [20, 1])
    monkeypatch.setattr("worker.kernels.bits._installed", lambda: False)
    plain = load_model(str(tmp_path), LoadOptions(dtype="bfloat16"))
    beside = PagedModel(plain, attention=TorchPagedAttention).chunked(ids, [20, 1])
    assert float((got - want).abs().mean()) < 1.1 * float((beside - want).abs().mean())
