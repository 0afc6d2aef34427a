"""Blocks that move, under kills at any point: no wrong token, no lost request, no lost block.

`pytest -m faults tests/faults/test_moving_blocks.py -s` prints what moved.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from tests.faults.client import Outcome, ask, ask_all, completion, session
from tests.faults.cluster import Cluster, Topology
from tests.faults.worker_process import Additions

NUM_KILLS = 100
NUM_CLIENTS = 8
NUM_PROMPTS = 48
POOL_BLOCKS = 400
"""Less than the prompts need, so that blocks are evicted, and loaded again."""
INTEGRITY_S = 10.0
"""An idle worker checks its pool this often, and dies of what it finds."""
WORDS = ["up", "down", "left", "right", "north", "south", "east", "west"]


def prompts(rng: random.Random) -> list[str]:
    """Return a tree: every prompt extends an earlier one, or begins a new one."""
    texts: list[str] = []
    for _ in range(NUM_PROMPTS):
        start = rng.choice(texts) if texts and rng.random() < 0.7 else ""
        texts.append((start if len(start) < 4000 else "") + " ".join(rng.choices(WORDS, k=120)) + " ")
    return texts


def bodies(rng: random.Random, **options: Any) -> list[dict[str, Any]]:
    options = {"max_tokens": 24, "temperature": 1.0, "seed": 11, "stream_options": {"include_usage": True}} | options
    return [completion(text, logprobs=0, **options) for text in prompts(rng)]


def topology(folder: Path, *, num_workers: int) -> Topology:
    folder.mkdir(parents=True, exist_ok=True)
    args = ["--dtype", "float32", "--deterministic", "--num-blocks", str(POOL_BLOCKS)]
    args += ["--kv-disk", str(folder), "--kv-disk-size", "32M"]
    return Topology(num_workers=num_workers, worker_args=args, additions=Additions(step_s=0.02))


async def cold(cluster: Cluster, asked: list[dict[str, Any]]) -> list[Outcome]:
    """Compute each answer without any block of another's."""
    salted = [body | {"cache_salt": str(number)} for number, body in enumerate(asked)]
    answers = await ask_all(cluster.gateway.url, salted, parallel=4)
    assert all(answer.ok for answer in answers)
    return answers


def places(outcome: Outcome) -> Counter[str]:
    assert outcome.usage is not None
    return Counter(outcome.usage["prompt_tokens_details"].get("headstart", {}))


async def check(cluster: Cluster, asked: list[dict[str, Any]], expected: list[Outcome]) -> Counter[str]:
    """Ask in order, a few at a time. Return the tokens that came from each place."""
    answers = await ask_all(cluster.gateway.url, asked, parallel=3)
    for number, (answer, want) in enumerate(zip(answers, expected, strict=True)):
        assert answer.ok, (number, answer.status, answer.error)
        assert answer.same_as(want), number
    return sum(map(places, answers), Counter())


class Clients:
    """Ask random prompts without end, and compare every answer."""

    def __init__(self, cluster: Cluster, asked: list[dict[str, Any]], expected: list[Outcome]) -> None:
        self._cluster, self._asked, self._expected = cluster, asked, expected
        self.num_answers = 0
        self.wrong: list[str] = []
        self.places: Counter[str] = Counter()
        self.stopping = False

    async def run(self, seed: float) -> None:
        rng = random.Random(seed)
        async with session() as http:
            while not self.stopping:
                number = rng.randrange(len(self._asked))
                answer = await ask(http, self._cluster.gateway.url, self._asked[number])
                self.num_answers += 1
                if not answer.ok:
                    self.wrong.append(f"prompt {number} lost: {answer.status} {answer.error}")
                elif not answer.same_as(self._expected[number]):
                    self.wrong.append(f"prompt {number} differs: {answer.choices} {self._expected[number].choices}")
                else:
                    self.places += places(answer)


async def kill_often(cluster: Cluster, clients: Clients, rng: random.Random) -> None:
    for number in range(NUM_KILLS):
        assert clients.wrong == [], f"after {number} kills"
        victim = rng.choice(cluster.workers)
        await asyncio.sleep(rng.uniform(0.0, 1.0))
        if rng.random() < 0.3:  # it drains, and dies somewhere in its hand-over
            victim.send(signal.SIGTERM)
            await asyncio.sleep(rng.uniform(0.0, 0.8))
        await asyncio.to_thread(victim.kill)
        victim.start()
        await asyncio.to_thread(cluster.wait_ready)


async def test_a_hundred_kills(tmp_path: Path, model: Path, rng: random.Random) -> None:
    with Cluster(tmp_path / "fleet", model, topology(tmp_path / "kv", num_workers=3)) as cluster:
        asked = bodies(rng)
        expected = await cold(cluster, asked)
        clients = Clients(cluster, asked, expected)
        tasks = [asyncio.create_task(clients.run(rng.random())) for _ in range(NUM_CLIENTS)]
        try:
            await kill_often(cluster, clients, rng)
        finally:
            clients.stopping = True
            await asyncio.gather(*tasks)
        print(f"{clients.num_answers} answers, tokens by place: {dict(clients.places)}")
        assert clients.wrong == []
        assert clients.places["disk"] > 0
        assert clients.places["peer"] > 0
        await asyncio.to_thread(cluster.assert_quiet, 20.0)
        await asyncio.sleep(INTEGRITY_S + 1.0)
        await check(cluster, asked[:3], expected[:3])
        await asyncio.sleep(1.0)
        assert all(worker.poll() is None for worker in cluster.workers)
        for worker in cluster.workers:
            assert "Traceback" not in worker.log.read_text(errors="replace"), worker.tail()
