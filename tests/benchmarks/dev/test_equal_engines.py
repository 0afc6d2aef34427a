"""Cold prompts over two equal engines, whose times vary: both get their part, and each prompt is charged its time."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Final

import pytest

from benchmarks.dev.simulation.engine import EngineModel, Job
from benchmarks.dev.simulation.fleet import ReplaySettings
from benchmarks.dev.simulation.replay import Replay
from benchmarks.dev.simulation.traces import Session, Workload, make_request, name_block
from server.router.policies import POLICIES

BLOCK: Final = 16
TOKENS_PER_S: Final = 1900.0
FIXED_S: Final = 0.05
JITTER: Final = 0.05
NUM_WARM: Final = 8
SETTLED_S: Final = 40.0
NUM_COLD: Final = 40
COLD_EVERY_S: Final = 3.5


class Charges(Replay):
    """Keeps the worker of each cold prompt, what it was charged, and what it took."""

    def __init__(self, workload: Workload, settings: ReplaySettings) -> None:
        super().__init__(workload, POLICIES["headstart"], settings)
        self.cold: list[tuple[str, float, float]] = []

    def _first_token(self, job: Job) -> None:
        super()._first_token(job)
        if job.session.conversation >= NUM_WARM:
            placement, num_tokens = job.placement, job.request.num_prompt_tokens - job.num_cached_tokens
            charged_s = placement.prefill_fixed_s + num_tokens / placement.prefill_tokens_per_s
            self.cold.append((placement.worker.worker_id, charged_s, job.prefill_s))


def workload(rng: random.Random) -> Workload:
    """Return conversations with a long prefix and short turns, and prompts that share nothing."""
    numbers, sessions = itertools.count(), list[Session]()

    def blocks(kind: str, num: int) -> list[int]:
        group = next(numbers)
        return [name_block(kind, group, at) for at in range(num)]

    def session(start_s: float, prompts: Iterator[list[int]], conversation: int) -> Session:
        requests = [make_request(next(numbers), len(ids) * BLOCK + 1, 32, ids) for ids in prompts]
        return Session(start_s, requests, [rng.random() for _ in requests], conversation)

    for conversation in range(NUM_WARM):
        prefix = blocks("prefix", 4000 // BLOCK)
        turns = ([*prefix, *blocks("turn", rng.randrange(2, 12))] for _ in range(150))
        sessions.append(session(2.0 * rng.random(), turns, conversation))
    for number in range(NUM_COLD):
        start_s = SETTLED_S + COLD_EVERY_S * (number + 0.3 * rng.random())
        sessions.append(session(start_s, iter([blocks("cold", rng.randrange(94, 375))]), NUM_WARM + number))
    return Workload(sessions, BLOCK, sum(len(each.requests) for each in sessions), 60_000, TOKENS_PER_S)


def test_equal_engines_share_cold_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, shares = random.Random(7), Counter[str]()

    def prefill_s(model: EngineModel, num_tokens: int, num_decoding: int) -> float:
        alone_s = FIXED_S + num_tokens / model.prefill_tokens_per_s
        return alone_s * (1.0 + 0.01 * num_decoding) * (1.0 + abs(rng.gauss(0.0, JITTER)))

    monkeypatch.setattr(EngineModel, "prefill_s", prefill_s)
    for seed in range(3):
        replay = Charges(workload(random.Random(seed)), ReplaySettings(2, 1.0, seed=seed))
        replay.run()
        assert len(replay.cold) == NUM_COLD
        shares.update(worker for worker, _, _ in replay.cold)
        for first in range(0, NUM_COLD, 10):
            _, charged_s, took_s = zip(*replay.cold[first : first + 10], strict=True)
            assert sum(charged_s) == pytest.approx(sum(took_s), rel=0.15)
    assert 0.4 <= max(shares.values()) / shares.total() <= 0.6, shares
