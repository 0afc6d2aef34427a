"""Recorded steps: a replay gives the logits of the same step, launched kernel by kernel."""

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


@pytest.mark.parametrize(
    ("family", "dtype", "max_rows"), [("llama2", "bfloat16", 64), ("smollm2", "float16", 64), ("qwen3", "bfloat16", 6)]
)
def test_a_replay_gives_the_same_logits(tmp_path: Path, device: str, family: str, dtype: str, max_rows: int) -> None:
    """Steps of every recorded number of rows, full and not: decodes, with a chunk of one sequence, and only a chunk.

    The tokens come from the host and from the device.
    """
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
    for num_rows, num_chunk in ((1, 0), (2, 0), (3, 2), (8, 0), (9, 9), (17, 5), (40, 0), (64, 16), (64, 64)):
        if num_rows > graphs.DECODE_ROWS[-1]:
            break
        steps = []
        for row in range(num_rows - num_chunk + (num_chunk > 0)):
            size = num_chunk if row == num_rows - num_chunk else 1
            table = [BlockId(1 + row * BLOCKS_EACH + place) for place in range(BLOCKS_EACH)]
            start = draw.randrange(longest - size)
            slots = [table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(start, start + size)]
            steps.append(SequenceStep(draw.choices(range(99), k=size), start, table, slots))
        steps.sort(key=lambda step: (len(step.token_ids), step.start))
        with torch.inference_mode():
            batch = build_batch(steps, runner._attention, runner._device, BLOCK_SIZE)
            want = model.decoder.forward(batch, runner._attention)
            unknown = [SequenceStep([0] * len(s.token_ids), s.start, s.block_table, s.slots) for s in steps]
            for given, token_ids in ((steps, None), (unknown, batch.token_ids)):
                if (found := recordings.hidden(given, token_ids)) is None:
                    continue
                tried += 1
                logits, wanted = (model.decoder.logits(hidden).log_softmax(-1).float() for hidden in (found[0], want))
                assert found[1].tolist() == batch.slots.tolist()
                assert float((logits - wanted).abs().max()) < TOLERANCE[dtype], (num_rows, token_ids is None)
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
