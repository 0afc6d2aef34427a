"""Sequences of known tokens through a runner, compared with `transformers` on the CPU."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cache.types import BlockId
from tests.worker.families import write_family
from worker.contracts.step import SamplingRow, SequenceResult, SequenceStep, Step
from worker.model.load import LoadOptions, load_model
from worker.runner.model_runner import ModelRunner
from worker.wire import SamplingParams

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
    """Run fresh and resumed chunks and decodes, separate and mixed, in blocks at random places."""
    reference = write_family(family, folder, **SHAPE)
    model = load_model(str(folder), options)
    draw = random.Random(0)
    counts = [-(-length // block_size) for length in LENGTHS]
    blocks = draw.sample(range(1, sum(counts) + 9), sum(counts))
    runner = ModelRunner(model, num_blocks=sum(counts) + 9, block_size=block_size, eos_token_ids=(), max_num_seqs=8)
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
