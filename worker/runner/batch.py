"""From a `worker.engine.step.Step` to the tensors of one forward, and back to the step's order."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker.attention.base import Attention, ForwardBatch, Span
from worker.device import to_device
from worker.engine.step import SequenceStep, Step


@dataclass(frozen=True, slots=True)
class BatchedSequence:
    """One sequence of the step; its tokens are rows first..stop-1 of the batch."""

    step: SequenceStep
    first: int
    stop: int
    index: int
    """Its place in the step."""


@dataclass(frozen=True, slots=True)
class Batch:
    sequences: tuple[BatchedSequence, ...]
    forward: ForwardBatch


def build_batch(step: Step, attention: Attention, device: torch.device, block_size: int) -> Batch:
    """Lay the step's sequences end to end in the order that `worker.attention.base` asks for."""
    order = sorted(range(len(step.sequences)), key=lambda index: _sort_key(step.sequences[index]))
    sequences, first = [], 0
    for index in order:
        sequence = step.sequences[index]
        stop = first + len(sequence.token_ids)
        sequences.append(BatchedSequence(sequence, first, stop, index))
        first = stop
    parts = [batched.step for batched in sequences]
    plan = attention.plan([_span(part, block_size) for part in parts])
    token_ids = [token_id for part in parts for token_id in part.token_ids]
    positions = [position for part in parts for position in range(part.start, part.start + len(part.token_ids))]
    slots = [slot for part in parts for slot in part.slots]
    tensors = to_device((token_ids, positions, slots), torch.int64, device)
    return Batch(tuple(sequences), ForwardBatch(tensors[0], tensors[1], tensors[2], plan))


def _span(part: SequenceStep, block_size: int) -> Span:
    """A table that is too short for the sequence goes round: see `cache.allocators.plain`. Its blocks are named again
    and again; what they held before lies outside of every layer's window."""
    table, stop = part.block_table, part.start + len(part.token_ids)
    num_blocks = -(-stop // block_size)
    if len(table) < num_blocks:
        table = [table[place % len(table)] for place in range(num_blocks)]
    return Span(part.start, len(part.token_ids), table)


def _sort_key(sequence: SequenceStep) -> tuple[int, int]:
    """Decodes first, by context length; chunks after them as they come (sorting is stable)."""
    is_decode = len(sequence.token_ids) == 1
    return (0, sequence.start) if is_decode else (1, 0)
