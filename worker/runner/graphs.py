"""Recorded steps of fixed shapes: on a GPU, launching the kernels of a small step takes longer than running them.

A recording reads the same memory at every replay. Each step is first copied into buffers of the recorded shape:

    rows         | d0 d1 c0 c0 c0 | -  -  - |     unused rows write to the null block and see its first token
    block table  | 4 9 2  0  0  0  0  0 ... |     all blocks of a context of the recorded length

Each token is a row of its own. A layer writes all rows before it reads, so a row of a short chunk sees those before it.
There is one recording for each pair of `DECODE_ROWS` and `CONTEXTS` (`worker.attention.base`). A step takes the
smallest that holds it. Recordings end with the hidden states: logits would cost memory in each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from worker.attention.base import CONTEXTS, DECODE_ROWS, Attention, ForwardBatch, Span, padded
from worker.contracts.step import SequenceStep
from worker.kernels.device import to_device
from worker.model.base import Decoder

Replay = Callable[[], Tensor]
Recorder = Callable[[Replay], Replay]
"""Returns a function that repeats `Replay` on the same memory, and returns the same tensor."""

_WARM_UP_RUNS: Final = 2  # the first one allocates and compiles
MAX_CHUNK_READS: Final = 1 << 17
"""Tokens that the rows of a step's chunks see together. Each row reads them again; a launched chunk reads them once."""


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


class StepGraphs:
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
        self._rows = [num_rows for num_rows in DECODE_ROWS if num_rows <= padded(max_rows, DECODE_ROWS)]
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

    def hidden(self, sequences: Sequence[SequenceStep], token_ids: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Return (num_tokens, hidden_size) and the slots written (num_tokens,). None: no recording fits the step.

        The next replay overwrites both. `token_ids` (num_tokens,), if given, replace those of the sequences.
        """
        stops = [sequence.start + len(sequence.token_ids) for sequence in sequences]
        chunks = [(len(s.token_ids), stop) for s, stop in zip(sequences, stops, strict=True) if len(s.token_ids) > 1]
        num_tokens = sum(len(sequence.token_ids) for sequence in sequences)
        if not sequences or num_tokens > self._rows[-1] or max(stops) > self._max_model_len:
            return None
        if sum(size * stop for size, stop in chunks) > MAX_CHUNK_READS:
            return None
        num_rows = padded(num_tokens, self._rows)
        recording = self._recordings[num_rows, next(length for length in self._lengths if length >= max(stops))]
        columns: list[tuple[int, int, int]] = []
        spans: list[Span] = []
        for sequence, stop in zip(sequences, stops, strict=True):
            positions = range(sequence.start, stop)
            columns += zip(sequence.token_ids, positions, sequence.slots, strict=True)
            spans += [Span(position, 1, sequence.block_table) for position in positions]
        columns += [(0, 0, 0)] * (num_rows - num_tokens)
        recording.inputs.copy_(to_device(columns, torch.int64, self._device).T)
        if token_ids is not None:
            recording.inputs[0, :num_tokens].copy_(token_ids)
        self._attention.refill(recording.plan, spans)
        return recording.replay()[:num_tokens], recording.inputs[2, :num_tokens]


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
