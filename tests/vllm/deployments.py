"""The table of docs/vllm_deployments.md, and an adapter before one rank of a running server of it."""

from __future__ import annotations

import asyncio
import random
import re
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from tests.waiting import HANG_S, until
from worker.adapter.connect import connect
from worker.adapter.engine import AdapterEngine
from worker.config import WorkerConfig
from worker.contracts.engine import EngineOutput, EngineSinks, RequestKey
from worker.contracts.metrics import WorkerMetrics
from worker.wire import ChoiceState, End, EngineCall, Failed, Frame, GenerateRequest, SamplingParams, Started

PAGE: Final = Path(__file__).parents[2] / "docs/vllm_deployments.md"
_ROW: Final = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
NUM_REQUESTS: Final = 500


class Deployment(NamedTuple):
    """A row of the table."""

    name: str
    options: tuple[str, ...]
    """Those of `vllm serve`."""
    result: str
    proof: str

    def __str__(self) -> str:
        return self.name


def rows() -> list[Deployment]:
    """Return the table, without its head."""
    return [
        Deployment(name, tuple(options.replace("`", "").split()), result, proof)
        for name, options, result, proof in _ROW.findall(PAGE.read_text())[2:]
    ]


class Served:
    """An adapter that runs, and the frames of its requests."""

    def __init__(self) -> None:
        self.frames: dict[RequestKey, list[Frame]] = defaultdict(list)
        self._next = 0

    def deliver(self, outputs: list[EngineOutput]) -> None:
        for key, frame in outputs:
            self.frames[key].append(frame)

    async def ask(self, engine: AdapterEngine, prompt_ids: list[int], root: bytes) -> tuple[int, int]:
        """Return the promise for a prompt, and the cached tokens that the engine has found."""
        key = RequestKey(self._next)
        self._next += 1
        body = {"max_tokens": 2, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        call = EngineCall("/v1/completions", msgspec.json.encode(body), True)
        choices, sampling = (ChoiceState(0, 7, ()),), SamplingParams(max_tokens=2)
        request = GenerateRequest(f"r{key}", "g", "", root, prompt_ids, choices, sampling, call=call)
        assert engine.refusal(request) is None
        engine.submit(key, request, None)
        frames = self.frames[key]
        await until(lambda: bool(frames) and isinstance(frames[-1], End | Failed))
        started = next(frame for frame in frames if isinstance(frame, Started))
        end = frames[-1]
        assert isinstance(end, End), end
        assert end.num_cached_tokens is not None
        return started.num_cached_tokens, end.num_cached_tokens


@asynccontextmanager
async def served(config: WorkerConfig) -> AsyncIterator[tuple[Served, AdapterEngine]]:
    served = Served()
    engine = await connect(config, "http://w", "w", WorkerMetrics(), print, EngineSinks(served.deliver))
    try:
        engine.start()
        await until(lambda: engine.load.num_blocks)
        yield served, engine
    finally:
        await engine.close()


async def count_wrong_promises(served: Served, engine: AdapterEngine, num_requests: int) -> tuple[int, int]:
    """Return how often the index has promised more than the engine found, and how many hits there were.

    One request at a time, after the events of the one before: an eviction on its way is no promise.
    """
    rng = random.Random(5)
    prefixes = [[rng.randrange(1000, 20_000) for _ in range(400)] for _ in range(6)]
    roots = [bytes([number]) * 16 for number in (1, 2)]
    num_wrong = num_hits = 0

    async def one() -> None:
        nonlocal num_wrong, num_hits
        prefix = rng.choice(prefixes)[: rng.randrange(32, 400)]
        prompt = [*prefix, *[rng.randrange(1000, 20_000) for _ in range(rng.randrange(1, 60))]]
        async with asyncio.timeout(HANG_S):
            promised, found = await served.ask(engine, prompt, rng.choice(roots))
        num_wrong += promised > found
        num_hits += promised > 0

    for _ in range(num_requests):
        await one()
        num_batches = -1
        while num_batches != engine._blocks.num_batches:
            num_batches = engine._blocks.num_batches
            await asyncio.sleep(0.02)
    return num_wrong, num_hits
