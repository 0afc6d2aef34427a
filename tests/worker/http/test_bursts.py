"""Bursts at a queue with limits of time: a refusal is right only if those in front would have waited past the limit.

Engine and service are the product's. The clock is simulated: a step takes a fixed time, and a time for each token.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest

from cache.allocators import make_allocator
from tests.worker.scheduler.arithmetic_runner import ArithmeticRunner, step_tokens
from tests.worker.scheduler.engine import BUNDLE, MEMBER, generate
from worker.contracts.engine import EngineOutput, EngineSinks, RefusedError, RequestKey
from worker.contracts.metrics import WorkerMetrics
from worker.contracts.rates import PrefillRate
from worker.contracts.step import SampledToken, SequenceResult, Step
from worker.engine.engine import EngineCore
from worker.http.service import WorkerService
from worker.http.streams import QueueLimits
from worker.scheduler.budget import BatchLimits
from worker.scheduler.scheduler import Scheduler
from worker.wire import Failed, GenerateRequest

NUM_BLOCKS, BLOCK_SIZE = 20_000, 16
TOKENS_PER_S = 500.0
STEP_S = 0.04
LIMIT_S = 120.0


@dataclass
class Refusal:
    at_s: float
    limit_s: float
    ahead: list[RequestKey]


class SteppedEngine(EngineCore):
    """Its thread never starts."""

    def start(self) -> None:
        pass


class Server(ArithmeticRunner):
    """A worker over simulated time, which passes in the steps of its runner. Make it in an event loop."""

    def __init__(self, measured_tokens_per_s: float, max_num_seqs: int) -> None:
        super().__init__(1, BLOCK_SIZE)
        self.now_s = 0.0
        self.refusals: list[Refusal] = []
        self.started_s: dict[RequestKey, float] = {}
        """Infinite for those that waited past their deadline."""
        self._left: deque[tuple[float, GenerateRequest]] = deque()
        metrics = WorkerMetrics()
        self._service = WorkerService(metrics, queue_limits=QueueLimits(max_queue_s=LIMIT_S))
        self._sinks = self._service.sinks()
        limits = BatchLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=512)
        self._engine = SteppedEngine(
            Scheduler(make_allocator("hash", NUM_BLOCKS, BLOCK_SIZE), limits, ()),
            self,
            PrefillRate(1000, 1000 / measured_tokens_per_s, measured_tokens_per_s * STEP_S),
            replace(BUNDLE, vocab_size=1000),
            replace(MEMBER, max_model_len=10_000),
            metrics,
            sinks=EngineSinks(self._deliver),
        )
        self._service.start(self._engine)

    def compute(self, step: Step) -> list[SequenceResult]:
        self._pass(STEP_S + step_tokens(step) / TOKENS_PER_S)
        return [SequenceResult((SampledToken(7),) * len(each.sampling_rows)) for each in step.sequences]

    def run(self, arrivals: Iterable[tuple[float, GenerateRequest]]) -> None:
        """Serve requests that arrive at these times, to the end."""
        self._left.extend(sorted(arrivals, key=lambda arrival: arrival[0]))
        with patch.object(time, "monotonic", lambda: self.now_s):
            while self._left or self._service.num_open:
                if not self._service.num_open:
                    self._pass(self._left[0][0] - self.now_s)
                self._engine._step()

    def _pass(self, seconds: float) -> None:
        """Let time pass, in which requests arrive."""
        end_s = self.now_s + seconds
        while self._left and self._left[0][0] <= end_s:
            at_s, wire = self._left.popleft()
            self.now_s = max(self.now_s, at_s)
            self._arrive(wire)
        self.now_s = max(self.now_s, end_s)

    def _arrive(self, wire: GenerateRequest) -> None:
        code = "the service waits"
        try:
            self._service.submit(wire).send(None)
        except StopIteration:
            return
        except RefusedError as error:
            code = error.failed.code
        assert code == "queue_full"
        limit_s = LIMIT_S if wire.deadline_s is None else min(wire.deadline_s, LIMIT_S)
        ahead = [key for key, stream in self._service._streams.items() if not stream.started]
        self.refusals.append(Refusal(self.now_s, limit_s, ahead))

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        for key, frame in outputs:
            self.started_s.setdefault(key, math.inf if isinstance(frame, Failed) else self.now_s)
        self._sinks.deliver(outputs)

    def check(self) -> None:
        """Assert that each refusal was right."""
        for refusal in self.refusals:
            last_s = max((self.started_s[key] for key in refusal.ahead), default=0.0)
            assert last_s - refusal.at_s > refusal.limit_s, (
                f"refused at {refusal.at_s:.1f} s for {refusal.limit_s} s,"
                f" but {len(refusal.ahead)} in front had started after {last_s - refusal.at_s:.1f} s"
            )


def prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(1000) for _ in range(num_tokens)]


def chats(
    rng: random.Random, number: int, at_s: float, mean_tokens: int = 30, shared: int = 0, **params
) -> list[tuple[float, GenerateRequest]]:
    """A burst within a second, with a common system prompt of `shared` tokens."""
    system = prompt(rng, shared)
    return [
        (
            at_s + rng.random(),
            generate([*system, *prompt(rng, rng.randint(1, 2 * mean_tokens))], rng.randint(1, 16), **params),
        )
        for _ in range(number)
    ]


def singles(rng: random.Random, number: int, pause_s: float = 0.1) -> list[tuple[float, GenerateRequest]]:
    """Requests one by one, of which some meet."""
    return [(number * pause_s, generate(prompt(rng, rng.randint(5, 400)), 4)) for number in range(number)]


BEFORE = {
    "fresh": lambda rng: [],
    "after single requests": lambda rng: singles(rng, 40),
    "after requests that met": lambda rng: singles(rng, 40, pause_s=0.5),
    "after one long prompt": lambda rng: [(0.0, generate(prompt(rng, 8000), 4))],
    "with a long prompt": lambda rng: [(99.5, generate(prompt(rng, 8000), 4))],
    "with five long prompts": lambda rng: [(99.0 + 0.1 * i, generate(prompt(rng, 8000), 4)) for i in range(5)],
}


@pytest.mark.parametrize("seed", [0, 1, 3, 8, 9, 15, 18, 21, 34, 38, 39, 45])
async def test_a_burst_is_refused_only_where_it_had_waited(seed: int) -> None:
    """Whatever came before it, with a deadline or without, of long and short prompts, at a server measured too slow."""
    rng = random.Random(seed)
    before, number, deadline_s = rng.choice(list(BEFORE)), rng.choice([300, 1000]), rng.choice([None, 10.0, 40.0])
    mean_tokens, shared = rng.choice([(30, 0), (30, 800), (300, 0)])
    server = Server(rng.choice([1.0, 0.7]) * TOKENS_PER_S, max_num_seqs=rng.choice([8, 64]))
    server.run([*BEFORE[before](rng), *chats(rng, number, 100.0, mean_tokens, shared, deadline_s=deadline_s)])
    server.check()
