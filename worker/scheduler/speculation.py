"""Speculative decoding with drafts from the sequence's own tokens (`drafter.py`, vLLM's `ngram` method).

A step verifies a draft: each of its tokens is one more row of the batch, and the step samples after each. Sampled
tokens count up to the first that differs from its draft, so they equal those of single steps.

The measured cost of a row, and the hit rate of a sequence's lookups, decide the length of its draft.
Source: Leviathan et al., arXiv 2211.17192, for the gain of a draft against its cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from worker.contracts.rates import StepCost
from worker.scheduler.drafter import Drafter
from worker.scheduler.plan import PlannedChunk, StepPlan
from worker.scheduler.request import TokenSequence


class Speculation:
    """Adds drafts to steps of decodes where they are likely to save time. Owned by the scheduler."""

    def __init__(self, max_drafts: int, cost: StepCost | None = None) -> None:
        """Draft at most `max_drafts` tokens of a sequence in a step. Without a `cost`, every row pays."""
        self.cost = cost or StepCost()
        self._max_drafts = max_drafts

    def add_drafts(self, plan: StepPlan, max_rows: int, eos_token_ids: frozenset[int]) -> None:
        """Add the drafts that raise the tokens per second, up to `max_rows` rows. A step with prefills gets none.

        A draft ends before the token that would end its sequence: no token follows that one.
        """
        if plan.num_prefill_tokens or not plan.chunks:
            return
        drafters = {chunk: _drafter(chunk.sequence) for chunk in plan.chunks.values()}
        for chunk, num_drafts in self._choose(drafters, max_rows - len(plan.chunks)).items():
            if chunk.sequence.blocks.extend(chunk.stop + num_drafts):
                chunk.draft_ids = _up_to_end(drafters[chunk].draft(num_drafts), chunk.sequence, eos_token_ids)

    def would_draft(self, plan: StepPlan) -> bool:
        """Return whether a step after `plan` would get drafts, if it waited for the tokens of `plan`."""
        decodes = [chunk for chunk in plan.chunks.values() if not chunk.is_prefill and chunk.sequence.choices]
        drafters = {chunk: _drafter(chunk.sequence) for chunk in decodes}
        return bool(self._choose(drafters, 1))

    def measure(self, plan: StepPlan, duration_s: float) -> None:
        """Take the duration of a step."""
        if not plan.num_prefill_tokens:
            self.cost.measure(plan.num_decode_rows, duration_s)

    def _choose(self, drafters: dict[PlannedChunk, Drafter], room: int) -> dict[PlannedChunk, int]:
        """Return the number of draft tokens of each chunk that gets any, the likeliest tokens first."""
        chunks = [chunk for chunk, drafter in drafters.items() if drafter.has_source and self._max_drafts_of(chunk)]
        chosen: dict[PlannedChunk, int] = {}
        likely = [(-drafters[chunk].hit_rate(0), index) for index, chunk in enumerate(chunks)]  # heapq's first is least
        heapify(likely)
        num_rows, num_expected = len(drafters), float(len(drafters))
        while likely and room > 0:
            negative, index = likely[0]
            # A row pays if its expected tokens a second exceed those of the step so far: hit / row_s > expected / step.
            if -negative * self.cost.seconds(num_rows) < num_expected * self.cost.row_s:
                break
            chunk = chunks[index]
            num_drafts = chosen[chunk] = chosen.get(chunk, 0) + 1
            num_rows, num_expected, room = num_rows + 1, num_expected - negative, room - 1
            if num_drafts < self._max_drafts_of(chunk):
                heapreplace(likely, (negative * drafters[chunk].hit_rate(num_drafts), index))
            else:
                heappop(likely)
        return chosen

    def _max_drafts_of(self, chunk: PlannedChunk) -> int:
        """Return how many draft tokens a sequence may have: none follows its last token."""
        sequence = chunk.sequence
        num_left = sequence.sampling.max_tokens - len(sequence.choices[0].output_ids)
        return min(self._max_drafts, num_left - 1)


def _up_to_end(draft_ids: Sequence[int], sequence: TokenSequence, eos_token_ids: frozenset[int]) -> Sequence[int]:
    """Return the draft up to the first token that would end the sequence, without that one."""
    request, num_output = sequence.request, len(sequence.choices[0].output_ids)
    for index, token_id in enumerate(draft_ids):
        if request.stops_at(token_id, num_output + index + 1, eos_token_ids):
            return draft_ids[:index]
    return draft_ids


def _drafter(sequence: TokenSequence) -> Drafter:
    """Return the sequence's drafter, with all of its tokens."""
    drafter = sequence.drafter
    if drafter is None:
        drafter = sequence.drafter = Drafter(sequence.token_ids)
    elif len(drafter) < len(sequence.token_ids):
        drafter.extend(sequence.token_ids[len(drafter) :])
    return drafter
