"""`--deterministic`: chunks and the rest of the batch change no bit of a result."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.worker.families import write_family
from tests.worker.paged import PagedModel
from worker.attention.base import AttentionShape
from worker.attention.kv_cache import KVCache
from worker.attention.selector import select_attention
from worker.model.linear import TiledLinear, dense_linear
from worker.model.load import LoadedModel, LoadOptions, load_model

LENGTH = 75


@pytest.fixture(scope="module", params=["llama3", "mistral_window"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    write_family(request.param, folder)
    return folder


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def model(request: pytest.FixtureRequest, folder: Path) -> LoadedModel:
    return load_model(str(folder), LoadOptions(dtype=request.param, deterministic=True))


def tokens(length: int, seed: int) -> list[int]:
    ids: list[int] = torch.randint(0, 99, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def paged(model: LoadedModel) -> PagedModel:
    attention = partial(select_attention, deterministic=True)
    return PagedModel(model, block_size=8, num_blocks=128, attention=attention)


@pytest.mark.parametrize("sizes", [[1], [7], [16, 1], [40, 3], [74, 1]], ids=str)
def test_chunks_are_equal_to_the_bit(model: LoadedModel, sizes: list[int]) -> None:
    ids = tokens(LENGTH, 0)
    whole = paged(model).chunked(ids, [LENGTH])
    assert torch.equal(paged(model).chunked(ids, sizes), whole)


def test_other_sequences_of_the_batch_change_nothing(model: LoadedModel) -> None:
    prompts = [tokens(length, seed) for seed, length in enumerate((75, 3, 40, 17, 1, 64, 33))]
    alone = [paged(model).chunked(prompt, [len(prompt)]) for prompt in prompts]
    crowd, rng = paged(model), random.Random(0)
    sequences = [crowd.sequence(prompt) for prompt in prompts]
    got: list[list[Tensor]] = [[] for _ in prompts]
    while left := [row for row, one in enumerate(sequences) if one.num_computed < len(one.token_ids)]:
        rows = rng.sample(left, rng.randint(1, len(left)))
        steps = [sequences[row].step(rng.choice([1, 1, 5, 30])) for row in rows]
        for row, logits in zip(rows, crowd.logits(steps), strict=True):
            got[row].append(logits)
    for want, parts in zip(alone, got, strict=True):
        assert torch.equal(torch.cat(parts), want)


def test_it_equals_the_reference(model: LoadedModel, folder: Path) -> None:
    ids = tokens(LENGTH, 9)
    want = PagedModel(load_model(str(folder), LoadOptions())).chunked(ids, [LENGTH])
    got = paged(model).chunked(ids, [20])
    divergence = (want.softmax(-1) * (want.log_softmax(-1) - got.log_softmax(-1))).sum(-1).mean()
    assert float(divergence) < (0.05 if model.dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float16, 64), (torch.float32, 8), (torch.bfloat16, 17)])
def test_it_is_refused_where_no_kernel_serves_the_model(dtype: torch.dtype, head_dim: int) -> None:
    shape = AttentionShape(1, 4, 2, head_dim, 1.0)
    cache = KVCache(shape, 4, 8, dtype, torch.device("cpu"))
    with pytest.raises(ValueError, match="--deterministic needs the compiled kernels: they serve float32 and"):
        select_attention(shape, cache, deterministic=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_a_row_of_a_tiled_product_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    weight = torch.randn(96, 576, generator=torch.Generator().manual_seed(0)).to(dtype)
    states = torch.randn(200, 576, generator=torch.Generator().manual_seed(1)).to(dtype)
    linear = TiledLinear(dense_linear(weight))
    whole = linear(states)
    for rows in (slice(0, 1), slice(77, 78), slice(3, 50), slice(31, 200)):
        assert torch.equal(linear(states[rows]), whole[rows])
