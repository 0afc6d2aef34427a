"""Recorded decode steps of fixed shapes: on a GPU, launching the kernels of a small step takes as long as running them.

A recording reads the same memory at every replay. Each step is first copied into buffers of the recorded shape:

    rows         | d0 d1 d2 | -  -  -  -  - |     unused rows write to the null block and see its first token
    block table  | 4 9 2  0  0  0  0  0 ... |     all blocks of a context of the recorded length

There is one recording for each number of rows and context length in `worker.attention.base.ROWS` and `CONTEXTS`. A step
takes the smallest that holds it. Recordings end with the hidden states: logits would cost memory in each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from worker.attention.base import CONTEXTS, ROWS, Attention, ForwardBatch, Span, padded
from worker.contracts.step import SequenceStep
from worker.kernels.device import to_device
from worker.model.base import Decoder

Replay = Callable[[], Tensor]
Recorder = Callable[[Replay], Replay]
"""Returns a function that repeats `Replay` on the same memory, and returns the same tensor."""

_WARM_UP_RUNS: Final = 2


@runtime_checkable
class RecordableAttention(Attention, Protocol):
    """An attention whose plan of a given shape can be refilled in place."""

    def static_plan(self, num_rows: int, num_blocks: int) -> object:
        """Plan `num_rows` decodes over at most `num_blocks` blocks each. All see the null block's first token."""

    def refill(self, plan: object, spans: Sequence[Span]) -> None:
        """Set the first rows to these decodes. The others see the null block's first token."""


@dataclass(frozen=True, slots=True)
class _Recording:
    inputs: Tensor
    """(3, num_rows) int64: token ids, positions, slots"""
    plan: object
    replay: Replay


class DecodeGraphs:
    """The recordings of one decoder over one pool. To make them takes seconds on a GPU."""

    def __init__(
        self,
        decoder: Decoder,
        attention: RecordableAttention,
        device: torch.device,
        *,
        block_size: int,
        max_rows: int,
        max_model_len: int,
        record: Recorder,
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._device = device
        self._max_model_len = max_model_len
        self._rows = [num_rows for num_rows in ROWS if num_rows <= padded(max_rows, ROWS)]
        shorter = {length for length in CONTEXTS if length < max_model_len}
        self._lengths = sorted(shorter | {padded(max_model_len, CONTEXTS)})
        self._recordings: dict[tuple[int, int], _Recording] = {}
        for length in reversed(self._lengths):  # the largest first: smaller ones reuse its memory
            for num_rows in reversed(self._rows):
                inputs = torch.zeros((3, num_rows), dtype=torch.int64, device=device)
                plan = attention.static_plan(num_rows, -(-length // block_size))
                batch = ForwardBatch(inputs[0], inputs[1], inputs[2], plan)

                def run(batch: ForwardBatch = batch) -> Tensor:
                    return decoder.forward(batch, attention)

                self._recordings[num_rows, length] = _Recording(inputs, plan, record(run))

    def logits(self, sequences: Sequence[SequenceStep], token_ids: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Return (sequences, vocab_size) logits and the slots written (sequences,). None: no recording fits the step.

        `token_ids` (sequences,), if given, replace those of the sequences.
        """
        if not sequences or len(sequences) > self._rows[-1] or any(len(s.token_ids) != 1 for s in sequences):
            return None
        longest = max(sequence.start for sequence in sequences) + 1
        if longest > self._max_model_len:
            return None
        num_rows = padded(len(sequences), self._rows)
        recording = self._recordings[num_rows, next(length for length in self._lengths if length >= longest)]
        columns = [(sequence.token_ids[0], sequence.start, sequence.slots[0]) for sequence in sequences]
        columns += [(0, 0, 0)] * (num_rows - len(columns))
        recording.inputs.copy_(to_device(columns, torch.int64, self._device).T)
        if token_ids is not None:
            recording.inputs[0, : len(token_ids)].copy_(token_ids)
        spans = [Span(sequence.start, 1, sequence.block_table) for sequence in sequences]
        self._attention.refill(recording.plan, spans)
        return self._decoder.logits(recording.replay()[: len(sequences)]), recording.inputs[2, : len(sequences)]


def rerun(run: Replay) -> Replay:
    """Compile the kernels but record nothing, for decoders that work on the host at every step."""
    run()
    return run


def cuda_recorder() -> Recorder:
    """Record CUDA graphs of the current device.

    The graphs share one memory pool, and one stream because libraries keep a workspace per stream.
    """
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(run: Replay) -> Replay:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # the first calls allocate and compile, which a recording must not do
            for _ in range(_WARM_UP_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            output = run()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    return record
