"""The step after one that still runs, as far as it can be known before the tokens are drawn that it begins with."""

from __future__ import annotations

from collections.abc import Set

from worker.scheduler.plan import Plan, PlannedChunk
from worker.scheduler.request import Sequence


def foresee(running: Plan, ended: Set[Sequence]) -> Plan | None:
    """The sequences of the plan a token further each, less those that have ended and those that surely will.

    None: it may be another step. A token that ends its sequence cannot be foreseen: what follows it is dropped later.
    """
    plan = Plan()
    for place, (sequence, chunk) in enumerate(running.chunks.items()):
        if sequence in ended:
            continue
        if not _is_clear(chunk):
            return None
        if len(chunk.drawing[0].output_ids) + 1 < sequence.request.wire.sampling.max_tokens:
            plan.chunks[sequence] = PlannedChunk(sequence, chunk.stop, chunk.stop + 1, False, follows=place)
    return plan if plan.chunks else None


def _is_clear(chunk: PlannedChunk) -> bool:
    """Whether all of the sequence's next step is known but the token that this one draws: it has a single choice,
    whose draws take no account of which tokens were drawn before."""
    request, sampling = chunk.sequence.request, chunk.sequence.request.wire.sampling
    return (
        len(chunk.drawing) == 1
        and not sampling.reads_output
        and len(chunk.drawing[0].output_ids) >= sampling.min_tokens
        and request.prompt_logprobs is None
        and not request.wire.is_suspect
    )
