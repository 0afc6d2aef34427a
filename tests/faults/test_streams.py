"""200 streams of every kind while workers are killed and stopped at random tokens: rows 7 and 8, in bulk."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.client import Outcome, ask, session
from tests.faults.cluster import Cluster, Topology
from tests.faults.part import Worker
from tests.faults.worker_process import Additions

NUM_STREAMS = 200
NUM_SEEDS = 10
PARALLEL = 64
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "bob", "cyd"]}, "tags": {"type": "array", "items": {"type": "boolean"}}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_p": 0.95, "top_k": 500},
    {"temperature": 0.7, "frequency_penalty": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"frequency_penalty": 1.5},
    {"temperature": 1.0, "stop": ["a", "e"], "min_tokens": 20},
    {"temperature": 0.8, "n": 2},
    {"temperature": 0.6, "logprobs": 2},
    {"json": True, "temperature": 0.5},
    {"tool": True, "temperature": 0.5},
    {"temperature": 0.9, "stream": False},
]


def random_body(rng: random.Random, kind: dict[str, Any] | None = None) -> dict[str, Any]:
    """A request of this kind, or of any."""
    words = rng.choices(["sun", "moon", "star", "sky", "sea"], k=rng.randint(3, 80))
    body = {"model": "tiny", "stream": True, "max_tokens": rng.randint(20, 60), "temperature": 0}
    body |= rng.choice(KINDS) if kind is None else kind
    body |= {"seed": rng.randrange(1 << 30), "return_token_ids": True}
    is_json, is_tool = body.pop("json", False), body.pop("tool", False)
    if is_json or is_tool:
        body["messages"] = [{"role": "user", "content": " ".join(words)}]
    if is_tool:
        body["tools"] = [{"type": "function", "function": {"name": "book", "parameters": SCHEMA}}]
        body["tool_choice"] = "required"
    elif is_json:
        form = {"name": "thing", "schema": SCHEMA, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    else:
        body |= {"prompt": " ".join(words), "ignore_eos": True}
    return body


def requests(rng: random.Random) -> list[dict[str, Any]]:
    """Return the same number of each kind, in random order."""
    asked = [random_body(rng, KINDS[number % len(KINDS)]) for number in range(NUM_STREAMS)]
    rng.shuffle(asked)
    return asked


class Chaos:
    """Hits a random worker, one at a time, whenever the next number of tokens has come."""

    def __init__(self, cluster: Cluster, rng: random.Random, num_tokens: int) -> None:
        self._cluster = cluster
        self._rng = rng
        self._left = [rng.randrange(num_tokens // 10, num_tokens // 2), rng.randrange(num_tokens // 8, num_tokens // 3)]
        self._next = self._left.pop()
        self._num_tokens = 0
        self.hits: list[tuple[Worker, int]] = []
        self._healing: asyncio.Task[None] | None = None

    def token(self, outcome: Outcome) -> None:
        self._num_tokens += 1
        if self._num_tokens >= self._next and (self._healing is None or self._healing.done()):
            victim = self._rng.choice([worker for worker in self._cluster.workers if worker.poll() is None])
            number = self._rng.choice([signal.SIGKILL, signal.SIGSTOP])
            victim.send(number)
            self.hits.append((victim, number))
            self._next = self._num_tokens + self._left.pop() if self._left else 1 << 60
            self._healing = asyncio.create_task(self._heal(victim, number))

    async def _heal(self, victim: Worker, number: int) -> None:
        if number == signal.SIGSTOP:
            await asyncio.sleep(6.0)
            victim.thaw()
        else:
            await asyncio.to_thread(victim.wait)
            victim.start()
            await asyncio.to_thread(self._cluster.wait_ready)

    async def healed(self) -> None:
        if self._healing is not None:
            await self._healing


async def run(cluster: Cluster, asked: list[dict[str, Any]], chaos: Chaos | None = None) -> list[Outcome]:
    gate = asyncio.Semaphore(PARALLEL)
    async with session() as http:

        async def one(body: dict[str, Any]) -> Outcome:
            async with gate:
                return await ask(http, cluster.gateway.url, body, on_tokens=None if chaos is None else chaos.token)

        return list(await asyncio.gather(*map(one, asked)))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Cluster]:
    # Some of the draws are within float32's rounding of the boundary of two tokens (one of seed 1 within 1e-10). A
    # resumed sequence, computed in other steps, is the same to the bit only in this mode.
    topology = Topology(
        num_workers=3,
        worker_args=["--deterministic"],
        gateway_args=["--stall-s", "1"],
        additions=Additions(step_s=0.01),
        static_workers=True,
    )
    with Cluster(tmp_path_factory.mktemp("streams"), model, topology) as running:
        yield running


@pytest.mark.parametrize("number", range(NUM_SEEDS))
async def test_two_hundred_streams(cluster: Cluster, rng: random.Random, number: int) -> None:
    """Every stream ends with the text of an undisturbed run or with an explicit error; 99 of 100 with the text."""
    asked = requests(rng)
    reference = await run(cluster, asked)
    assert all(outcome.ok for outcome in reference), [outcome for outcome in reference if not outcome.ok][:3]
    chaos = Chaos(cluster, rng, sum(outcome.num_tokens for outcome in reference))
    outcomes = await run(cluster, asked, chaos)
    await chaos.healed()
    assert chaos.hits, "nothing was broken"
    wrong = [
        (body, outcome, want)
        for body, outcome, want in zip(asked, outcomes, reference, strict=True)
        if not outcome.same_as(want)
    ]
    silent = [each for each in wrong if not each[1].explicit]
    print(
        f"{[(w.name, n) for w, n in chaos.hits]}: {NUM_STREAMS - len(wrong)} of {NUM_STREAMS} exact,"
        f" {[each[1].error for each in wrong]}"
    )
    assert not silent, silent[:2]
    assert len(wrong) <= NUM_STREAMS // 100, wrong[:3]
    cluster.assert_quiet()
