"""Four workers restart one after the other under conversations: their blocks survive by hand-over, or on disk.

`pytest -m faults tests/faults/test_rolling_restart.py -s` prints the hit rates.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.client import ask, completion, session
from tests.faults.cluster import Cluster, Topology
from tests.faults.worker_process import Additions

NUM_CONVERSATIONS = 40
NUM_TURNS = 30
THINK_S = (4.0, 8.0)
WINDOW_S = 20.0
WORDS = ["up", "down", "left", "right", "north", "south", "east", "west"]


@dataclass
class Answered:
    """One turn: when it ended, and its prompt's tokens."""

    at_s: float
    num_tokens: int
    num_cached: int


def hit_rate(turns: list[Answered], since_s: float, until_s: float) -> float:
    chosen = [turn for turn in turns if since_s <= turn.at_s < until_s]
    assert len(chosen) > NUM_CONVERSATIONS / 2, "too few turns to judge"
    return sum(turn.num_cached for turn in chosen) / sum(turn.num_tokens for turn in chosen)


async def converse(http, url: str, rng: random.Random, turns: list[Answered], stopping: asyncio.Event) -> None:
    """Talk until stopped, with a new conversation after some turns."""
    text, num_left = "", rng.randint(5, NUM_TURNS)
    await asyncio.sleep(rng.uniform(0, THINK_S[1]))
    while not stopping.is_set():
        text += " ".join(rng.choices(WORDS, k=80)) + " "
        outcome = await ask(http, url, completion(text, max_tokens=4, stream=False))
        assert outcome.ok, outcome
        usage = outcome.usage
        assert usage is not None
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        turns.append(Answered(time.monotonic(), usage["prompt_tokens"], cached))
        num_left -= 1
        if num_left == 0:
            text, num_left = "", NUM_TURNS
        await asyncio.sleep(rng.uniform(*THINK_S))


async def restart_all(cluster: Cluster, stop: Callable[[int], None]) -> None:
    """Restart the workers one by one, each when the one before serves again."""
    for number, worker in enumerate(cluster.workers):
        stop(number)
        await asyncio.to_thread(worker.wait)
        worker.start()
        await asyncio.to_thread(cluster.wait_ready)


async def measure(cluster: Cluster, rng: random.Random, number: int) -> float:
    """Return the hit rate just after a rolling restart, relative to the one before."""
    turns: list[Answered] = []
    stopping = asyncio.Event()
    async with session() as http, asyncio.TaskGroup() as group:
        for _ in range(NUM_CONVERSATIONS):
            rng_of_one = random.Random(rng.random())
            group.create_task(converse(http, cluster.gateway.url, rng_of_one, turns, stopping))
        await asyncio.sleep(2.5 * WINDOW_S)
        begun_s = time.monotonic()
        await restart_all(cluster, lambda n: cluster.workers[n].send(number))
        ended_s = time.monotonic()
        await asyncio.sleep(WINDOW_S)
        stopping.set()
    before, after = hit_rate(turns, begun_s - WINDOW_S, begun_s), hit_rate(turns, ended_s, ended_s + WINDOW_S)
    print(
        f"hit rate before {before:.3f}, after {after:.3f}: {after / before:.3f}; {ended_s - begun_s:.1f} s of restarts"
    )
    return after / before


@pytest.mark.parametrize("way", ["hand-over", "disk", "neither"])
def test_blocks_survive_a_rolling_restart(way: str, tmp_path: Path, model: Path, rng: random.Random) -> None:
    disk = ["--kv-disk", str(tmp_path / "kv"), "--kv-disk-size", "256M"] if way == "disk" else []
    topology = Topology(num_workers=4, worker_args=disk, additions=Additions(step_s=0.05))
    if disk:
        (tmp_path / "kv").mkdir()
    number = signal.SIGTERM if way == "hand-over" else signal.SIGKILL
    with Cluster(tmp_path / "fleet", model, topology) as cluster:
        kept = asyncio.run(measure(cluster, rng, number))
        cluster.assert_quiet(within_s=20.0)
    assert way == "neither" or kept >= 0.9
