"""The default model from its GGUF file against `transformers` reading the same file."""

from __future__ import annotations

import pytest
import torch

from tests import smollm2
from tests.worker.paged import PagedModel
from worker.model.load import LoadedModel, LoadOptions, load_model

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("", LoadOptions())


def test_logits_match_the_reference(model: LoadedModel) -> None:
    ids = smollm2.tokenizer().encode("The cache holds the prefix; the suffix is computed. 12 + 30 = 42").ids
    with torch.inference_mode():
        want = smollm2.reference_model()(torch.tensor([ids])).logits[0]
    paged = PagedModel(model, num_blocks=16, block_size=16)
    assert float((paged.chunked(ids, [len(ids)]) - want).abs().max()) < 1e-3
    assert float((paged.chunked(ids, [16, 1]) - want).abs().max()) < 1e-3
