"""When requests leave, and that turns follow each other."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.replay_load.client import ChatClient, Outcome, Target
from benchmarks.replay_load.driver import Pace, drive, start_times
from benchmarks.replay_load.workload import Conversation, Turn

TURN = Turn([{"role": "user", "content": "Hi"}], None)
TWELVE = [Conversation(f"c{number}", [TURN] * 3, float(number)) for number in range(12)]


class Recorder(ChatClient):
    """Answers after two turns of the event loop; counts how many requests were open at once."""

    def __init__(self, fails: frozenset[tuple[str, int]] = frozenset()) -> None:
        super().__init__(Target("none", "http://127.0.0.1:1", "m"), max_tokens=1, timeout_s=1)
        self.asked: list[tuple[str, int]] = []
        self.most_open = 0
        self._num_open = 0
        self._fails = fails

    async def ask(self, conversation: str, number: int, turn: Turn) -> Outcome:
        self._num_open += 1
        self.most_open = max(self.most_open, self._num_open)
        self.asked.append((conversation, number))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self._num_open -= 1
        error = "refused" if (conversation, number) in self._fails else None
        return Outcome(conversation, number, 0.0, error=error)


async def test_a_closed_loop_keeps_so_many_open() -> None:
    client, num_done = Recorder(), 0

    def done() -> None:
        nonlocal num_done
        num_done += 1

    outcomes = await drive(client, TWELVE, Pace(concurrency=3), done)
    assert client.most_open == 3
    assert num_done == len(outcomes) == 36
    for conversation in TWELVE:
        assert [n for name, n in client.asked if name == conversation.name] == [1, 2, 3]


async def test_after_a_failure_a_conversation_is_over() -> None:
    num_done = 0

    def done() -> None:
        nonlocal num_done
        num_done += 1

    client = Recorder(frozenset({("c0", 2)}))
    outcomes = await drive(client, TWELVE[:2], Pace(concurrency=1), done)
    assert [(o.conversation, o.turn) for o in outcomes] == [("c0", 1), ("c0", 2), ("c1", 1), ("c1", 2), ("c1", 3)]
    assert num_done == 6


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    client = Recorder()
    await drive(client, TWELVE, Pace(speed=1e9), lambda: None)
    assert client.most_open == 12


def test_start_times() -> None:
    assert start_times(TWELVE, Pace()) is None
    assert start_times(TWELVE, Pace(speed=2.0)) == [number / 2 for number in range(12)]
    times_s = start_times(TWELVE * 50, Pace(rate_per_s=4.0, seed=1))
    assert times_s is not None
    assert times_s == sorted(times_s)
    assert times_s[-1] / len(times_s) == pytest.approx(0.25, rel=0.15)
    assert times_s == start_times(TWELVE * 50, Pace(rate_per_s=4.0, seed=1))
    with pytest.raises(ValueError, match="--speed"):
        start_times([Conversation("c", [TURN])], Pace(speed=2.0))
