"""Decide when to send.

A closed loop keeps N conversations open at a time. An open loop starts them at given times, however fast the server is.
Within a conversation a turn follows the answer to the one before, after the recorded pause.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.replay_load.client import ChatClient, Outcome
from benchmarks.replay_load.workload import Conversation


@dataclass(frozen=True, slots=True)
class Pace:
    """`concurrency` by itself is a closed loop; `rate_per_s` or `speed` open it."""

    concurrency: int = 4
    rate_per_s: float | None = None
    """Conversations begun a second, at random times (Poisson)."""
    speed: float | None = None
    """Factor by which the recorded start times are faster."""
    max_think_s: float = 0.0
    seed: int = 0


async def drive(
    client: ChatClient, conversations: Sequence[Conversation], pace: Pace, done: Callable[[], None]
) -> list[Outcome]:
    """Every turn's outcome; `done` is called after each. A conversation ends at its first failure."""
    outcomes: list[Outcome] = []

    async def play(conversation: Conversation) -> None:
        failed = False
        for number, turn in enumerate(conversation.turns, 1):
            if not failed:
                await asyncio.sleep(min(turn.think_s, pace.max_think_s) if number > 1 else 0.0)
                outcome = await client.ask(conversation.name, number, turn)
                outcomes.append(outcome)
                failed = outcome.error is not None
            done()

    starts_s = start_times(conversations, pace)
    if starts_s is None:
        left = iter(conversations)

        async def take() -> None:
            for conversation in left:
                await play(conversation)

        await asyncio.gather(*(take() for _ in range(pace.concurrency)))
    else:

        async def wait(start_s: float, conversation: Conversation) -> None:
            await asyncio.sleep(start_s)
            await play(conversation)

        pairs = zip(starts_s, conversations, strict=True)
        await asyncio.gather(*(wait(start_s, conversation) for start_s, conversation in pairs))
    return outcomes


def start_times(conversations: Sequence[Conversation], pace: Pace) -> list[float] | None:
    """Seconds from the start of the run; None for a closed loop. Raises ValueError without recorded times."""
    if pace.speed is not None:
        recorded = [conversation.start_s for conversation in conversations if conversation.start_s is not None]
        if len(recorded) != len(conversations):
            raise ValueError("--speed: this recording has no start times; use --rate or --concurrency")
        first_s = min(recorded)
        return [(start_s - first_s) / pace.speed for start_s in recorded]
    if pace.rate_per_s is not None:
        rng = random.Random(pace.seed)
        times_s, now_s = [], 0.0
        for _ in conversations:
            times_s.append(now_s)
            now_s += rng.expovariate(pace.rate_per_s)
        return times_s
    return None
