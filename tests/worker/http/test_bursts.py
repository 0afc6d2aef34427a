"""Bursts at a queue with limits of time: a refusal is right only if those in front would have waited past the limit.

The scheduler, its reports and the limits are the product's. The clock is simulated: a step takes a fixed time, and a
time for each of its tokens.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest

from tests.worker.scheduler.engine import HandEngine, generate
from worker.contracts.metrics import WorkerMetrics
from worker.contracts.rates import PrefillRate
from worker.contracts.step import SampledToken, SequenceResult
from worker.engine import reporter
from worker.engine.reporter import Reporter
from worker.http.streams import QueueAccounting, QueueLimits
from worker.scheduler.request import Request
from worker.wire import GenerateRequest

TOKENS_PER_S = 500.0
STEP_S = 0.04
LIMIT_S = 120.0


@dataclass
class Refusal:
    at_s: float
    limit_s: float
    ahead: list[Request]
    """All that waited."""


@dataclass
class Server:
    """An engine and the limits of its queue, over simulated time."""

    measured_tokens_per_s: float = TOKENS_PER_S
    limits: QueueLimits = field(default_factory=lambda: QueueLimits(max_queue_s=LIMIT_S))
    max_num_seqs: int = 64
    now_s: float = 0.0
    refusals: list[Refusal] = field(default_factory=list)
    num_taken: int = 0
    started_s: dict[Request, float] = field(default_factory=dict)
    """Infinite for those that waited past their deadline."""

    def __post_init__(self) -> None:
        self.engine = HandEngine(20_000, 16, max_num_seqs=self.max_num_seqs, max_num_batched_tokens=512)
        self.queue = QueueAccounting(self.limits)
        rate = PrefillRate(1000, 1000 / self.measured_tokens_per_s, self.measured_tokens_per_s * STEP_S)
        self.reporter = Reporter(self.engine.scheduler, rate, WorkerMetrics())
        self.waiting: dict[int, Request] = {}

    def arrive(self, wire: GenerateRequest) -> None:
        if self.queue.refusal(wire, self.reporter.pace) is not None:
            limit_s = self.limits.max_queue_s if wire.deadline_s is None else min(wire.deadline_s, LIMIT_S)
            self.refusals.append(Refusal(self.now_s, limit_s, list(self.waiting.values())))
            return
        self.num_taken += 1
        self.queue.add(wire)
        self.engine.now_s = self.now_s
        request = self.engine.submit(wire)
        self.waiting[request.key] = request

    def start(self, request: Request) -> None:
        if self.waiting.pop(request.key, None) is not None:
            self.queue.remove(request.wire)
            self.started_s[request] = self.now_s

    def step(self, arrivals: deque[tuple[float, GenerateRequest]]) -> None:
        """Run a step, during which requests arrive."""
        engine, scheduler = self.engine, self.engine.scheduler
        for request in list(self.waiting.values()):
            if self.now_s >= request.deadline_s:
                self.start(request)
                self.started_s[request] = math.inf
        for output in scheduler.expire(self.now_s):
            engine.answers[output.key].add(output.frame)
        plan = scheduler.schedule(self.now_s)
        if plan is None:
            self.now_s = max([self.now_s, *(at_s for at_s, _ in list(arrivals)[:1])])
        else:
            for request in plan.started:
                self.start(request)
            self.reporter.starts.record(len(plan.started), len(scheduler.waiting), self.now_s)
        with patch.object(reporter.time, "monotonic", lambda: self.now_s):
            self.reporter.report()
        duration_s = STEP_S + plan.num_tokens / TOKENS_PER_S if plan else 0.0
        end_s = self.now_s + duration_s
        while arrivals and arrivals[0][0] <= end_s:
            at_s, wire = arrivals.popleft()
            self.now_s = max(self.now_s, at_s)
            self.arrive(wire)
        self.now_s = end_s
        if plan is not None:
            token = SampledToken(7)
            results = [SequenceResult((token,) * len(chunk.sampled_choices)) for chunk in plan.chunks.values()]
            scheduler.update(plan, results, self.now_s)
            self.reporter.measure(plan, duration_s, self.now_s)

    def run(self, arrivals: Iterable[tuple[float, GenerateRequest]]) -> None:
        """Serve requests that arrive at these times, to the end."""
        left = deque(sorted(arrivals, key=lambda arrival: arrival[0]))
        while left or self.engine.scheduler.has_work:
            self.step(left)

    def check(self) -> None:
        """Assert that each refusal was right."""
        for refusal in self.refusals:
            last_s = max((self.started_s[request] for request in refusal.ahead), default=0.0)
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
def test_a_burst_is_refused_only_where_it_had_waited(seed: int) -> None:
    """Whatever came before it, with a deadline or without, of long and short prompts, at a server measured too slow."""
    rng = random.Random(seed)
    before, number, deadline_s = rng.choice(list(BEFORE)), rng.choice([300, 1000]), rng.choice([None, 10.0, 40.0])
    mean_tokens, shared = rng.choice([(30, 0), (30, 800), (300, 0)])
    server = Server(rng.choice([1.0, 0.7]) * TOKENS_PER_S, max_num_seqs=rng.choice([8, 64]))
    server.run([*BEFORE[before](rng), *chats(rng, number, 100.0, mean_tokens, shared, deadline_s=deadline_s)])
    server.check()
