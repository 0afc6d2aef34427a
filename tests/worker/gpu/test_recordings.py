"""Recorded decodes: a replay gives the logits of the same step, launched kernel by kernel."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch

from cache.types import BlockId
from tests.worker.families import write_family
from tests.worker.gpu.fed import SHAPE, TOLERANCE
from worker.contracts.step import SamplingRow, SequenceStep, Step
from worker.model.load import LoadOptions, load_model
from worker.runner import graphs
from worker.runner.model_runner import ModelRunner, build_batch
from worker.wire import SamplingParams

pytestmark = pytest.mark.gpu
BLOCK_SIZE, BLOCKS_EACH = 16, 20


@pytest.mark.parametrize("family", ["llama2", "smollm2", "qwen3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("max_rows", [64, 6])
def test_a_replay_gives_the_same_logits(tmp_path: Path, device: str, family: str, dtype: str, max_rows: int) -> None:
    """Steps of every recorded number of rows, full and not, the tokens from the host and from the device."""
    write_family(family, tmp_path, **SHAPE)
    model = load_model(str(tmp_path), LoadOptions(dtype=dtype, device=device))
    num_blocks = 1 + 64 * BLOCKS_EACH
    runner = ModelRunner(model, num_blocks=num_blocks, block_size=BLOCK_SIZE, eos_token_ids=(), max_num_seqs=max_rows)
    recordings, draw, tried = runner._graphs, random.Random(0), 0
    assert recordings is not None, "the log says why nothing was recorded"
    assert runner.numerics.endswith("/xformers")
    for pool in (*runner.cache.keys, *runner.cache.values):
        pool.normal_()
    longest = min(256, graphs.CONTEXTS[0])
    for num_rows in (1, 2, 3, 8, 9, 17, 40, 64):
        if num_rows > graphs.ROWS[-1]:
            break
        steps = []
        for row in range(num_rows):
            table = [BlockId(1 + row * BLOCKS_EACH + place) for place in range(BLOCKS_EACH)]
            start = draw.randrange(longest)
            slot = table[start // BLOCK_SIZE] * BLOCK_SIZE + start % BLOCK_SIZE
            steps.append(SequenceStep([draw.randrange(99)], start, table, [slot]))
        steps.sort(key=lambda step: step.start)
        with torch.inference_mode():
            batch = build_batch(steps, runner._attention, runner._device, BLOCK_SIZE)
            want = model.decoder.logits(model.decoder.forward(batch, runner._attention))
            unknown = [SequenceStep([0], step.start, step.block_table, step.slots) for step in steps]
            for given, token_ids in ((steps, None), (unknown, batch.token_ids)):
                if (found := recordings.logits(given, token_ids)) is None:
                    continue
                tried += 1
                error = (found[0].log_softmax(-1).float() - want.log_softmax(-1).float()).abs().max()
                assert float(error) < TOLERANCE[dtype], (num_rows, token_ids is None)
    assert tried >= 4


def test_the_parts_of_a_step_are_timed(tmp_path: Path, device: str) -> None:
    write_family("llama3", tmp_path, **SHAPE)
    model = load_model(str(tmp_path), LoadOptions(dtype="float16", device=device))
    runner = ModelRunner(model, num_blocks=40, block_size=16, eos_token_ids=(), max_num_seqs=4)
    begun_s = time.perf_counter()
    for token_ids, start in ((range(20), 0), ((20,), 20)):  # a chunk, and a decode from a recording
        stop = start + len(token_ids)
        row = SamplingRow(SamplingParams(max_tokens=8, temperature=0.0), 0, stop, range(stop), ())
        table, slots = (BlockId(1), BlockId(2)), range(16 + start, 16 + stop)
        times = runner.launch(Step([SequenceStep(token_ids, start, table, slots, (row,))])).collect().times
        assert times is not None
        assert 0 < min(times) <= sum(times) < time.perf_counter() - begun_s
