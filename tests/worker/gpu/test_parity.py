"""Greedy tokens of 32 prompts in one batch equal those of `transformers` in float32, but for near ties."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import interpreter
from tests.worker.families import write_family
from tests.worker.gpu.fed import SHAPE
from tests.worker.scheduler.engine import HandEngine, generate
from worker.model.load import LoadOptions, load_model
from worker.runner.model_runner import ModelRunner

pytestmark = pytest.mark.gpu
NUM_PROMPTS = 32
MODEL = os.environ.get("GPU_CHECK_MODEL", "")
"""A folder with a checkpoint; '' is a tiny one of random weights."""
TIE = 0.05
"""Two log probabilities this close may come in either order."""


def prompts(vocab_size: int) -> list[list[int]]:
    """Return prompts of many lengths, half of which share a beginning."""
    draw, longest = random.Random(0), 12 if interpreter.is_on() else 150
    shared = draw.choices(range(3, vocab_size), k=longest // 2)
    return [
        shared[: longest // 2 * (index % 2)] + draw.choices(range(3, vocab_size), k=1 + draw.randrange(longest // 2))
        for index in range(NUM_PROMPTS)
    ]


@pytest.mark.parametrize("dtype", ["float16"])
def test_greedy_tokens_equal_the_reference(tmp_path: Path, device: str, dtype: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = Path(MODEL)
    if not MODEL:
        folder = tmp_path
        write_family("llama3", folder, **SHAPE)
    model = load_model(str(folder), LoadOptions(dtype=dtype, device=device))
    num_tokens = 2 if interpreter.is_on() else 12
    runner = ModelRunner(model, num_blocks=600, block_size=16, eos_token_ids=(), max_num_seqs=NUM_PROMPTS)
    engine = HandEngine(600, 16, runner=runner, async_scheduling=True, max_num_batched_tokens=512)
    given = prompts(model.config.vocab_size)
    requests = [engine.submit(generate(ids, num_tokens, temperature=0.0, ignore_eos=True)) for ids in given]
    engine.finish()
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    wrong = []
    for ids, request in zip(given, requests, strict=True):
        output = engine.answer(request).tokens[0]
        assert len(output) == num_tokens
        with torch.inference_mode():
            logits = reference(torch.tensor([ids + output[:-1]])).logits[0, len(ids) - 1 :].log_softmax(-1)
        gaps = [float(row.max() - row[token_id]) for row, token_id in zip(logits, output, strict=True)]
        if max(gaps) > TIE:
            wrong.append((len(ids), gaps))
    assert wrong == []
