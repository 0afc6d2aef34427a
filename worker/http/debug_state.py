"""What stands in the engine's queues and tables right now, for a person who looks for what is stuck."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from worker.scheduler.request import TokenSequence
from worker.scheduler.scheduler import Scheduler


def debug_state(scheduler: Scheduler) -> dict[str, Any]:
    """As JSON values. Call it on the engine's thread."""
    return {
        "pool": asdict(scheduler.allocator.stats()),
        "running": [_sequence(sequence) for sequence in scheduler.running],
        "waiting": [_sequence(sequence) for sequence in scheduler.waiting],
        "num_requests": len(scheduler.requests),
    }


def _sequence(sequence: TokenSequence) -> dict[str, Any]:
    request = sequence.request
    return {
        "request_id": request.wire.request_id,
        "gateway_id": request.wire.gateway_id,
        "choices": [choice.index for choice in sequence.choices],
        "num_prompt_tokens": len(request.prompt_ids),
        "num_tokens": len(sequence.token_ids),
        "num_computed": sequence.num_computed,
        "num_cached_tokens": request.num_cached_tokens,
        "block_table": [] if sequence.allocation is None else list(sequence.allocation.block_table),
        "priority": request.wire.priority,
    }
