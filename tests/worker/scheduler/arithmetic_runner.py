"""A runner whose arithmetic is exact: the next token is a hash of every token read back through the block table.

Any wrong slot, table, copy, chunk or cached prefix gives a wrong token at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from zlib import crc32

import torch

from cache.hashing import encode_tokens
from cache.types import NULL_BLOCK
from worker.contracts.step import Launch, SampledToken, SamplingRow, SequenceResult, SequenceStep, Step, StepResult
from worker.kernels.device import DeviceStream
from worker.wire import SamplingParams, TokenLogprobs

VOCAB = 50
UNWRITTEN = -1
GARBAGE = 49_999


def next_token(token_ids: Sequence[int], seed: int) -> int:
    return crc32(encode_tokens(token_ids) + seed.to_bytes(8, "little")) % VOCAB


def answer(prompt_ids: Sequence[int], seed: int, max_tokens: int, stop_ids: Sequence[int] = ()) -> list[int]:
    """Return the tokens that a correct engine gives for one choice."""
    token_ids = list(prompt_ids)
    while len(token_ids) < len(prompt_ids) + max_tokens:
        token_ids.append(next_token(token_ids, seed))
        if token_ids[-1] in stop_ids:
            break
    return token_ids[len(prompt_ids) :]


def step_tokens(step: Step) -> int:
    return sum(len(each.token_ids) for each in step.sequences)


def is_probe(step: Step) -> bool:
    return [each.block_table for each in step.sequences] == [(NULL_BLOCK,)]


class ArithmeticRunner:
    """`worker.contracts.step.Runner`. `fails` may raise; the step then leaves garbage wherever it was to write."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        fails: Callable[[Step], bool] = lambda step: False,
        stream: DeviceStream | None = None,
        window: int | None = None,
    ) -> None:
        """With a `window`, a token depends on that many before it."""
        self.window = window
        self.stream = stream or DeviceStream(torch.device("cpu"))
        self.block_size = block_size
        self.kv = [UNWRITTEN] * (num_blocks * block_size)
        self.fails = fails
        self.steps: list[Step] = []
        self.last: list[SequenceResult] = []
        self._last_step = Step(())

    @property
    def overlaps(self) -> bool:
        return self.stream.overlaps

    def prepare(self, params: SamplingParams, prompt_ids: Sequence[int]) -> object:
        return threading.get_ident(), params.allowed_token_ids

    def launch(self, step: Step) -> Launch[StepResult]:
        return self.stream.enqueue(lambda: StepResult(self.compute(step)))

    def run(self, step: Step) -> list[SequenceResult]:
        return self.launch(step).collect().sequences

    def compute(self, step: Step) -> list[SequenceResult]:
        assert step.sequences, "an empty step"
        self.steps.append(step)
        size = self.block_size
        for copy in step.copies:
            source, destination = copy.source * size, copy.destination * size
            self.kv[destination : destination + size] = self.kv[source : source + size]
        written = [slot for sequence in step.sequences for slot in sequence.slots]
        assert len(written) == len(set(written)), "two tokens of one step share a slot"
        assert is_probe(step) or all(slot >= size for slot in written), "the null block is written"
        if self.fails(step):
            for slot in written:
                self.kv[slot] = GARBAGE
            raise RuntimeError("the device says no")
        followed = step.followed_rows(self._last_step.sequences)
        self._last_step = step
        for index, sequence in enumerate(step.sequences):
            assert len(sequence.slots) == len(sequence.token_ids) > 0
            token_ids = sequence.token_ids
            if followed:
                token_ids = [self.last[followed[index]].sampled[0].token_id]
            for slot, token_id in zip(sequence.slots, token_ids, strict=True):
                self.kv[slot] = token_id
        self.last = [self._result(sequence) for sequence in step.sequences]
        return self.last

    def _sample(self, read: Sequence[int], row: SamplingRow) -> int:
        return next_token(read, row.seed)

    def _result(self, sequence: SequenceStep) -> SequenceResult:
        size, table = self.block_size, sequence.block_table
        stop = sequence.start + len(sequence.token_ids)
        first = 0 if self.window is None else max(0, sequence.start + 1 - self.window)
        assert self.window is not None or stop <= len(table) * size, "a table is too short"
        read = [self.kv[table[i // size % len(table)] * size + i % size] for i in range(first, stop)]
        assert UNWRITTEN not in read, "KV is read that was never written"
        read = read[-(self.window or stop) :]
        sampled = tuple(SampledToken(self._sample(read, row)) for row in sequence.sampling_rows)
        for row in sequence.sampling_rows:
            num_known = len(row.prompt_ids) + row.num_output  # and perhaps the token that the step follows
            assert row.position == stop
            assert num_known == stop or (sequence.follows is not None and num_known == stop - 1)
        logprobs = ()
        if sequence.num_prompt_logprobs is not None:
            logprobs = tuple(TokenLogprobs(-float(token_id)) for token_id in sequence.next_token_ids)
        return SequenceResult(sampled, logprobs)
