"""Steps that are launched before the one before them is read sample the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import interpreter
from tests.worker.families import write_family
from tests.worker.gpu.fed import SHAPE
from tests.worker.scheduler.engine import HandEngine, generate
from worker.model.load import LoadOptions, load_model
from worker.runner.model_runner import ModelRunner

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["qwen3", "mistral_window", "llama3"])
def test_they_sample_the_same_tokens(tmp_path: Path, device: str, family: str) -> None:
    write_family(family, tmp_path, **SHAPE)
    num_requests = 3 if interpreter.is_on() else 7
    model = load_model(str(tmp_path), LoadOptions(dtype="float16", device=device))

    def tokens(*, async_scheduling: bool) -> list[dict[int, list[int]]]:
        runner = ModelRunner(model, num_blocks=200, block_size=16, eos_token_ids=(), max_num_seqs=8)
        engine = HandEngine(200, 16, runner=runner, async_scheduling=async_scheduling, max_num_batched_tokens=80)
        wires = [
            generate([i * k % 99 for k in range(1, 4 + 9 * i)], 6 + 3 * i, temperature=float(i % 2))
            for i in range(num_requests)
        ]
        requests = [engine.submit(wire) for wire in wires]
        engine.finish()
        assert (engine.num_async > 0) == async_scheduling
        return [engine.answer(request).tokens for request in requests]

    assert tokens(async_scheduling=True) == tokens(async_scheduling=False)
