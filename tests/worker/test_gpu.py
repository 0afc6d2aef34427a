"""Results of a GPU, compared with transformers on the CPU: `pytest -m gpu`. One case runs without a GPU."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cache.types import BlockId
from tests.worker.families import FAMILIES, write_family
from tests.worker.scheduler.engine import HandEngine, generate
from worker import doctor
from worker.attention.torch_paged import TorchPagedAttention
from worker.engine.step import SamplingRow, SequenceResult, SequenceStep, Step
from worker.model.load import LoadOptions, load_model
from worker.runner.model_runner import ModelRunner
from worker.wire import SamplingParams

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),  # of xformers and triton, when kernels are built
]
LENGTHS = (100, 61, 20)
SHAPE = {"hidden_size": 96, "head_dim": 32, "initializer_range": 0.1}  # with heads that xformers' kernel takes
TOLERANCE = {"float16": 0.03, "bfloat16": 0.2}
"""For log probabilities; a CPU is off by up to 0.006 and 0.054."""


class Fed:
    """A sequence of known tokens that runs in parts; `error` is the largest deviation of its logprobs."""

    def __init__(self, token_ids: Sequence[int], blocks: Sequence[int], block_size: int, reference: Any) -> None:
        self.token_ids = list(token_ids)
        self.table = [BlockId(block) for block in blocks]
        self.block_size = block_size
        self.start = 0
        self.error = 0.0
        with torch.inference_mode():
            self.want = reference(torch.tensor([self.token_ids])).logits[0].log_softmax(-1)

    def next(self, num_tokens: int) -> SequenceStep:
        """Return a chunk with prompt logprobs, or a decode with the logprobs of its sample."""
        start, stop, size = self.start, self.start + num_tokens, self.block_size
        slots = [self.table[i // size] * size + i % size for i in range(start, stop)]
        fields: dict[str, Any] = {"num_prompt_logprobs": 3, "next_token_ids": self.token_ids[start + 1 : stop + 1]}
        if num_tokens == 1:
            params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=3)
            fields = {"sampling_rows": (SamplingRow(params, 0, stop, self.token_ids[:stop], ()),)}
        return SequenceStep(self.token_ids[start:stop], start, self.table, slots, **fields)

    def check(self, part: SequenceStep, result: SequenceResult) -> None:
        found = [
            *result.prompt_logprobs,
            *(sampled.logprobs for sampled in result.sampled if sampled.logprobs is not None),
        ]
        assert len(found) == len(part.next_token_ids) + len(part.sampling_rows) > 0
        for row, one in zip(self.want[self.start :], found, strict=False):
            for token_id, value in one.top:
                self.error = max(self.error, abs(float(row[token_id]) - value))
        self.start += len(part.token_ids)


def largest_error(folder: Path, family: str, block_size: int, options: LoadOptions) -> float:
    """Run fresh and resumed chunks and decodes, alone and mixed, in blocks that lie anywhere."""
    reference = write_family(family, folder, **SHAPE)
    model = load_model(str(folder), options)
    draw = random.Random(0)
    counts = [-(-length // block_size) for length in LENGTHS]
    blocks = draw.sample(range(1, sum(counts) + 9), sum(counts))
    runner = ModelRunner(model, num_blocks=sum(counts) + 9, block_size=block_size, eos_token_ids=())
    sequences = []
    for length, count in zip(LENGTHS, counts, strict=True):
        tokens = draw.choices(range(99), k=length)
        sequences.append(Fed(tokens, [blocks.pop() for _ in range(count)], block_size, reference))
    steps = [(40, 50, 0), (30, 1, 11), (0, 1, 1), (20, 1, 1), *[(1, 1, 1)] * 6]
    for sizes in steps:
        chosen = [(fed, size) for fed, size in zip(sequences, sizes, strict=True) if size]
        parts = [fed.next(size) for fed, size in chosen]
        for (fed, _), part, result in zip(chosen, parts, runner.run(Step(parts)), strict=True):
            fed.check(part, result)
    assert all(fed.start > 18 for fed in sequences)
    return max(fed.error for fed in sequences)


def test_the_measure_itself(tmp_path: Path) -> None:
    assert largest_error(tmp_path, "llama3", 16, LoadOptions()) < 1e-3


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
class TestFamilies:
    pytestmark = on_gpu

    def test_logprobs_are_those_of_transformers(self, tmp_path: Path, family: str, block_size: int, dtype: str) -> None:
        options = LoadOptions(dtype=dtype, device="cuda")
        assert largest_error(tmp_path, family, block_size, options) < TOLERANCE[dtype]


class TestRunner:
    pytestmark = on_gpu

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        write_family("llama3", tmp_path, **SHAPE)
        return tmp_path

    def test_decodes_are_recorded(self, folder: Path) -> None:
        runner = ModelRunner(
            load_model(str(folder), LoadOptions(dtype="float16", device="cuda")),
            num_blocks=40,
            block_size=16,
            eos_token_ids=(),
        )
        assert runner._graphs is not None
        assert runner.numerics.endswith("/xformers")

    def test_the_parts_of_a_step_are_timed(self, folder: Path) -> None:
        model = load_model(str(folder), LoadOptions(dtype="float16", device="cuda"))
        runner = ModelRunner(model, num_blocks=40, block_size=16, eos_token_ids=())
        begun_s = time.perf_counter()
        for token_ids, start in ((range(20), 0), ((20,), 20)):  # a chunk, and a decode from a recording
            stop = start + len(token_ids)
            row = SamplingRow(SamplingParams(max_tokens=8, temperature=0.0), 0, stop, range(stop), ())
            table, slots = (BlockId(1), BlockId(2)), range(16 + start, 16 + stop)
            times = runner.launch(Step([SequenceStep(token_ids, start, table, slots, (row,))])).collect().times
            assert times is not None
            assert 0 < min(times) <= sum(times) < time.perf_counter() - begun_s

    def test_steps_that_follow_others_in_flight_sample_the_same_tokens(self, folder: Path) -> None:
        model = load_model(str(folder), LoadOptions(dtype="float16", device="cuda"))

        def tokens(*, async_scheduling: bool) -> list[dict[int, list[int]]]:
            runner = ModelRunner(model, num_blocks=200, block_size=16, eos_token_ids=())
            engine = HandEngine(
                200, 16, runner=runner, async_scheduling=async_scheduling, max_model_len=256, max_num_batched_tokens=80
            )
            wires = [
                generate([i * k % 99 for k in range(1, 4 + 9 * i)], 6 + 3 * i, temperature=float(i % 2))
                for i in range(7)
            ]
            requests = [engine.submit(wire) for wire in wires]
            engine.finish()
            assert (engine.num_async > 0) == async_scheduling
            return [engine.answer(request).tokens for request in requests]

        assert tokens(async_scheduling=True) == tokens(async_scheduling=False)

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    def test_a_second_gpu(self, tmp_path: Path) -> None:
        options = LoadOptions(dtype="float16", device="cuda:1")
        assert largest_error(tmp_path, "llama3", 16, options) < TOLERANCE["float16"]

    def test_the_doctor_finds_the_kernel_well(self) -> None:
        assert doctor.kernel(torch.device("cuda")).status == "ok"
        assert doctor.largest_error(TorchPagedAttention, torch.device("cuda"), torch.bfloat16) < doctor.TOLERANCE
