"""The default model from its GGUF file against `transformers` reading the same file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from tests import smollm2
from tests.worker.paged import PagedModel
from worker.contracts.step import SamplingRow, SequenceStep, Step
from worker.model.load import LoadedModel, LoadOptions, load_model
from worker.runner.model_runner import ModelRunner
from worker.wire import SamplingParams

pytestmark = pytest.mark.e2e

_TAUBENCH = Path(__file__).parents[2] / "data" / "taubench_airline_text_dev.jsonl.gz"
_NUM_PROMPTS = 50
_NUM_TOKENS = 12
_TIE = 1e-4


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("", LoadOptions())


def prompts(count: int) -> list[list[int]]:
    """Messages of real conversations, of all lengths up to 150 tokens."""
    tokenizer, found = smollm2.tokenizer(), []
    with gzip.open(_TAUBENCH, "rt", encoding="utf-8") as lines:
        texts = {m["content"]: None for line in lines for m in json.loads(line)["messages"] if m.get("content")}
    for text in list(texts)[: 4 * count : 4]:
        found.append(tokenizer.encode(text).ids[:150])
    return found


def test_logits_match_the_reference(model: LoadedModel) -> None:
    ids = smollm2.tokenizer().encode("The cache holds the prefix; the suffix is computed. 12 + 30 = 42").ids
    with torch.inference_mode():
        want = smollm2.reference_model()(torch.tensor([ids])).logits[0]
    paged = PagedModel(model, num_blocks=16, block_size=16)
    assert float((paged.chunked(ids, [len(ids)]) - want).abs().max()) < 1e-3
    assert float((paged.chunked(ids, [16, 1]) - want).abs().max()) < 1e-3


@pytest.mark.deep
def test_greedy_tokens_equal_the_reference(model: LoadedModel) -> None:
    """All prompts in one batch here, one by one there; a difference counts unless the reference sees a tie."""
    found = prompts(_NUM_PROMPTS)
    assert len(found) == _NUM_PROMPTS
    outputs = generate(model, found)
    for prompt, output in zip(found, outputs, strict=True):
        with torch.inference_mode():
            logits = smollm2.reference_model()(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        for row, token_id in zip(logits, output, strict=True):
            assert float(row.max() - row[token_id]) < _TIE, (prompt, output)


def generate(model: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    blocks = [-(-(len(prompt) + _NUM_TOKENS) // 16) for prompt in prompts]
    runner = ModelRunner(model, num_blocks=1 + sum(blocks), block_size=16, eos_token_ids=(2,))
    firsts = [1 + sum(blocks[:index]) for index in range(len(blocks))]
    outputs: list[list[int]] = [[] for _ in prompts]
    params = SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0)
    for _ in range(_NUM_TOKENS):
        steps = []
        for prompt, output, first, count in zip(prompts, outputs, firsts, blocks, strict=True):
            start = len(prompt) + len(output) - 1 if output else 0
            ids = (prompt + output)[start:]
            slots = [16 * first + position for position in range(start, start + len(ids))]
            draw = SamplingRow(params, 0, len(prompt) + len(output), prompt, output)
            steps.append(SequenceStep(ids, start, range(first, first + count), slots, (draw,)))  # type: ignore[arg-type]
        for output, result in zip(outputs, runner.run(Step(steps)), strict=True):
            output.append(result.sampled[0].token_id)
    return outputs
