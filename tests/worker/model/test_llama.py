"""The Llama decoder against `transformers`, for every family, however the tokens are cut and batched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.worker.families import FAMILIES, write_family
from tests.worker.paged import PagedModel
from worker.model.load import LoadedModel, LoadOptions, load_model

TOLERANCE = 1e-3
LENGTH = 45


@dataclass(frozen=True)
class Family:
    name: str
    reference: Any
    model: LoadedModel

    @torch.inference_mode()
    def expected(self, token_ids: list[int]) -> Tensor:
        logits: Tensor = self.reference(torch.tensor([token_ids])).logits[0]
        return logits


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tmp_path_factory.mktemp(request.param)
    reference = write_family(request.param, folder)
    return Family(request.param, reference, load_model(str(folder), LoadOptions()))


def tokens(length: int, seed: int) -> list[int]:
    ids: list[int] = torch.randint(0, 99, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return float((got - want).abs().max())


def test_logits_match_the_reference(family: Family) -> None:
    ids = tokens(LENGTH, 0)
    want = family.expected(ids)
    assert float(want.std()) > 0.5, "the reference says nothing: its logits hardly differ"
    got = PagedModel(family.model).chunked(ids, [LENGTH])
    assert error(got, want) < TOLERANCE


@pytest.mark.parametrize("sizes", [[1], [5], [4, 8], [20, 1], [44, 1], [3, 30, 1]], ids=str)
def test_chunks_give_the_whole(family: Family, sizes: list[int]) -> None:
    ids = tokens(LENGTH, 1)
    assert error(PagedModel(family.model).chunked(ids, sizes), family.expected(ids)) < TOLERANCE


def test_a_batch_gives_what_each_gives_alone(family: Family) -> None:
    prompts = [tokens(length, seed) for seed, length in enumerate((45, 1, 2, 17, 31, 8, 30, 16))]
    paged = PagedModel(family.model)
    sequences = [paged.sequence(prompt) for prompt in prompts]
    got: list[list[Tensor]] = [[] for _ in prompts]
    # Prefill in uneven chunks and decode the last tokens, so that steps mix the two kinds.
    while any(sequence.num_computed < len(sequence.token_ids) for sequence in sequences):
        rows, steps = [], []
        for row, sequence in enumerate(sequences):
            left = len(sequence.token_ids) - sequence.num_computed
            if left:
                rows.append(row)
                steps.append(sequence.step(min(7 + row, left - 3) if left > 3 else 1))
        for row, logits in zip(rows, paged.logits(steps), strict=True):
            got[row].append(logits)
    for prompt, parts in zip(prompts, got, strict=True):
        assert error(torch.cat(parts), family.expected(prompt)) < TOLERANCE


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close(family: Family, dtype: str) -> None:
    ids = tokens(LENGTH, 4)
    path = str(family.model.checkpoint.path)
    model = load_model(path, LoadOptions(dtype=dtype))
    want = family.expected(ids).log_softmax(-1)
    got = PagedModel(model).chunked(ids, [30, 1]).log_softmax(-1)
    divergence = (want.exp() * (want - got)).sum(-1).mean()
    assert float(divergence) < 0.05


def test_a_head_of_its_own_is_not_tied(tmp_path: Path) -> None:
    """A training may change only the head: transformers then does not tie it either."""
    import transformers

    write_family("smollm2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "lm_head.weight": -tensors["model.embed_tokens.weight"]}, tmp_path / "model.safetensors")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = tokens(10, 6)
    family = Family("smollm2", reference, load_model(str(tmp_path), LoadOptions()))
    assert error(PagedModel(family.model).chunked(ids, [10]), family.expected(ids)) < TOLERANCE


def test_sharded_weights_load_like_one_file(tmp_path: Path) -> None:
    reference = write_family("qwen2", tmp_path / "one")
    reference.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    ids = tokens(10, 5)
    one, many = (
        PagedModel(load_model(str(tmp_path / name), LoadOptions())).chunked(ids, [10]) for name in ("one", "many")
    )
    assert torch.equal(one, many)
