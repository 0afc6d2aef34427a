"""A day of conversations: copies of the recorded ones side by side, more of them by day than by night.

Conversations keep their pace: more load is more of them. Each copy has blocks of its own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from benchmarks.dev.simulation.traces import ROOT, Session, TraceRequest, Workload, name_block
from cache.hashing import hash_chain

LOW: Final = 0.07
"""The rate at night, as a share of the highest."""


def daily_rate(at: float) -> float:
    """Return the rate at `at` of the day, from 0 to 1, as a share of the highest: slow to rise and quick to fall."""
    shape = 0.5 - 0.5 * math.cos(2 * math.pi * at) + 0.12 * math.sin(4 * math.pi * at)
    return LOW + (1.0 - LOW) * max(0.0, min(1.0, shape))


def day_of(
    recorded: Workload,
    *,
    duration_s: float,
    peak: float,
    prefill_tokens_per_s: float,
    seed: int,
    rate: Callable[[float], float] = daily_rate,
) -> Workload:
    """Return a day with `peak` times the recorded traffic at most. A conversation comes whole or not at all."""
    rng = random.Random(seed)
    recorded_s = recorded.sessions[-1].start_s - recorded.sessions[0].start_s
    conversations: dict[int, list[Session]] = {}
    for session in recorded.sessions:
        conversations.setdefault(session.conversation, []).append(session)
    sessions: list[Session] = []
    num_lanes, num_copies = math.ceil(peak), 0
    for _ in range(num_lanes):
        at_s = -rng.uniform(0.0, recorded_s)
        while at_s < duration_s:
            for conversation in conversations.values():
                begin = min(1.0, max(0.0, (at_s + conversation[0].start_s) / duration_s))
                if rng.random() * num_lanes < peak * rate(begin):
                    for session in conversation:
                        if 0.0 <= (start_s := at_s + session.start_s) < duration_s:
                            copied = _Copied(session.requests[0], num_copies)
                            sessions.append(Session(start_s, copied, (0.0,), session.conversation))
            at_s += recorded_s
            num_copies += 1
    sessions.sort(key=lambda session: session.start_s)
    return Workload(sessions, recorded.block_size, len(sessions), 1, prefill_tokens_per_s)


@dataclass(frozen=True, slots=True)
class _Copied(Sequence[TraceRequest]):
    """The one request of a session. It is hashed when it comes: a whole day of hashes takes a gigabyte."""

    recorded: TraceRequest
    copy: int

    def __len__(self) -> int:
        return 1

    def __getitem__(self, at: Any) -> Any:
        return (_copied(self.recorded, self.copy),)[at]


@lru_cache(maxsize=4096)
def _copied(request: TraceRequest, copy: int) -> TraceRequest:
    """Give the first block another name: hashes depend on all blocks before them."""
    block_ids = [name_block("copy", copy, request.block_ids[0]), *request.block_ids[1:]]
    chain = hash_chain(ROOT, block_ids, 1)
    number = copy << 16 | request.number
    return TraceRequest(number, request.num_prompt_tokens, request.num_output_tokens, block_ids, chain, chain[:-1])
