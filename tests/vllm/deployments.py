"""The table of docs/vllm_deployments.md, and an adapter before one rank of a running server of it."""

from __future__ import annotations

import asyncio
import random
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from cache.hashing import hash_chain
from cache.types import BlockHash
from tests.waiting import HANG_S, until
from worker.adapter.blocks import Applied, EngineBlocks
from worker.adapter.connect import connect
from worker.adapter.engine import AdapterEngine
from worker.adapter.kv_events import BlockRemoved, Event
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


class Evictions:
    """The last batch in which the engine has reported the end of each block."""

    def __init__(self, blocks: EngineBlocks) -> None:
        self._blocks = blocks
        self._apply = blocks.apply
        self._batches: dict[BlockHash, int] = {}
        blocks.apply = self._seen  # type: ignore[method-assign]

    def _seen(self, events: Iterable[Event]) -> Applied:
        for event in events:
            if isinstance(event, BlockRemoved):
                counts = event.remaining_copy_counts or (0,) * len(event.block_hashes)
                for key, num_left in zip(event.block_hashes, counts, strict=True):
                    node = self._blocks.tree.get(key)
                    for block_hash in () if node is None or num_left else node.hashes:
                        self._batches[block_hash] = self._blocks.num_batches + 1
        return self._apply(events)

    def any_since(self, at_batch: int, hashes: Sequence[BlockHash]) -> bool:
        return any(self._batches.get(each, 0) > at_batch for each in hashes)


class Promises(NamedTuple):
    """Counts of the promises of the index."""

    num_wrong: int
    """The engine found less, and has not evicted what it did not find."""
    num_evicted: int
    """The engine found less, as it evicted the rest after the promise: the news was on its way, or came later."""
    num_hits: int


async def count_promises(served: Served, engine: AdapterEngine, num_requests: int, at_once: int = 4) -> Promises:
    """Ask for prompts that share prefixes, some at once, and compare each promise with what the engine finds."""
    rng = random.Random(5)
    prefixes = [[rng.randrange(1000, 20_000) for _ in range(400)] for _ in range(6)]
    roots = [bytes([number]) * 16 for number in (1, 2)]
    blocks, size = engine._blocks, engine.member.block_size
    evictions = Evictions(blocks)
    broken: list[tuple[int, Sequence[BlockHash]]] = []
    num_hits = 0

    async def one() -> None:
        nonlocal num_hits
        prefix = rng.choice(prefixes)[: rng.randrange(32, 400)]
        prompt = [*prefix, *[rng.randrange(1000, 20_000) for _ in range(rng.randrange(1, 60))]]
        root, at_batch = rng.choice(roots), blocks.num_batches
        async with asyncio.timeout(HANG_S):
            promised, found = await served.ask(engine, prompt, root)
        num_hits += promised > 0
        if promised > found:
            hashes = hash_chain(BlockHash(root), prompt, size)
            first_missing = hashes[found // size : (found + engine.member.engine_block_size) // size]
            broken.append((at_batch, first_missing))

    for _ in range(num_requests // at_once):
        await asyncio.gather(*[one() for _ in range(at_once)])
        num_batches = -1
        while num_batches != blocks.num_batches:
            num_batches = blocks.num_batches
            await asyncio.sleep(0.02)
    num_evicted = sum(evictions.any_since(at_batch, hashes) for at_batch, hashes in broken)
    return Promises(len(broken) - num_evicted, num_evicted, num_hits)
