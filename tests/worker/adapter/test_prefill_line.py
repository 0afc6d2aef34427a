"""Measures of engines whose rate and fixed part are known, on a clock of the test's own.

One computes a prefill after the other. One has vLLM's steps: a part of several prompts, and one token of each answer.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pytest

from tests.worker.adapter.test_load import Clock
from worker.adapter import load as load_module
from worker.adapter.load import LoadAccount, Prefill

BLOCK: Final = 16
COLD: Final = (500, 1000, 2000, 4000, 8000)
SETTLED_S: Final = 30.0
END_S: Final = 180.0
EVERY_S: Final = 5.0
"""Interval between two judgements: of a minute, one in twenty may be wrong."""
JITTER_S: Final = 0.002


@dataclass
class Traffic:
    """Streams that each send the next prompt after the last answer. `warm`: the share of a prompt that is cached."""

    num_streams: int
    warm: float
    rng: random.Random
    has_cold: bool
    """One prompt in twenty is new, and one has a prefix that another request computes when it is sent."""

    def num_tokens(self) -> int:
        length = self.rng.randint(500, 8000)
        is_cold = self.has_cold and self.rng.random() < 0.05
        return max(1, length - (0 if is_cold else int(length * self.warm / BLOCK) * BLOCK))

    def pause_s(self) -> float:
        return 0.02 + self.rng.random() * 0.5


def serial(account: LoadAccount, clock: Clock, traffic: Traffic, fixed_s: float, tokens_per_s: float) -> Iterator[None]:
    """An engine that computes one prompt after the other; yields after each event."""
    number, free_s = itertools.count(), 0.0
    events: list[tuple[float, int, Prefill | None]] = []
    answers: list[tuple[Prefill, int]] = []
    for _ in range(traffic.num_streams):
        heapq.heappush(events, (traffic.pause_s(), next(number), None))
    while True:
        clock.now_s, _, prefill = heapq.heappop(events)
        if prefill is None:
            num_tokens = traffic.num_tokens()
            num_shared = traffic.rng.randint(500, 8000) if traffic.has_cold and traffic.rng.random() < 0.05 else 0
            sent = account.send("g", num_tokens + num_shared)
            answers.append((sent, num_tokens))
            free_s = max(clock.now_s, free_s) + fixed_s + num_tokens / tokens_per_s
            heapq.heappush(events, (free_s + abs(traffic.rng.gauss(0.0, JITTER_S)), next(number), sent))
        else:
            account.first_token(prefill)
            if len(answers) > traffic.num_streams:
                account.end(*answers.pop(0))
            heapq.heappush(events, (clock.now_s + traffic.pause_s(), next(number), None))
        yield


def stepping(
    account: LoadAccount, clock: Clock, traffic: Traffic, step_s: float, tokens_per_s: float, budget: int = 2048
) -> Iterator[None]:
    """An engine as vLLM: each step takes up to `budget` tokens of prompts, first come, first served."""
    waiting = [traffic.pause_s() for _ in range(traffic.num_streams)]
    prefills: dict[Prefill, int] = {}
    answers: list[int] = []
    while True:
        for at_s in [at_s for at_s in waiting if at_s <= clock.now_s]:
            waiting.remove(at_s)
            sent = account.send("g", traffic.num_tokens())
            prefills[sent] = sent.num_tokens
        if not prefills and not answers:
            clock.now_s = min(waiting)
            continue
        left = budget - len(answers)
        for prefill, num_left in prefills.items():
            prefills[prefill] -= min(num_left, left)
            left -= min(num_left, left)
        clock.now_s += step_s + (budget - len(answers) - left) / tokens_per_s + 0.0002 * len(answers)
        for prefill in [prefill for prefill, num_left in prefills.items() if not num_left]:
            del prefills[prefill]
            clock.now_s += 0.0001
            account.first_token(prefill)
            account.end(prefill)
            answers.append(traffic.rng.randint(5, 60))
        answers = [num_left - 1 for num_left in answers]
        waiting += [clock.now_s + traffic.pause_s() for num_left in answers if not num_left]
        answers = [num_left for num_left in answers if num_left]
        yield


@pytest.mark.parametrize("tokens_per_s", [500.0, 1900.0, 8000.0])
@pytest.mark.parametrize("fixed_s", [0.005, 0.05, 0.2])
def test_the_time_of_a_prefill(monkeypatch: pytest.MonkeyPatch, fixed_s: float, tokens_per_s: float) -> None:
    """Within 15 % after 30 s of traffic in 95 of 100 judgements, of any warm share and number of streams."""
    judged = wrong = judged_rates = wrong_rates = 0
    for warm, num_streams, has_cold in itertools.product((0.0, 0.5, 0.9, 0.97), (1, 4, 32), (False, True)):
        monkeypatch.setattr(load_module, "time", clock := Clock())
        clock.now_s = 0.0
        account, next_s = LoadAccount(), SETTLED_S
        traffic = Traffic(num_streams, warm, random.Random(num_streams), has_cold)
        engine = serial(account, clock, traffic, fixed_s, tokens_per_s)
        while clock.now_s < END_S:
            next(engine)
            if clock.now_s < next_s:
                continue
            next_s += EVERY_S
            load = account.current(None, BLOCK, False)
            off = [abs(account.line.seconds(num) / (fixed_s + num / tokens_per_s) - 1.0) for num in COLD]
            judged, wrong = judged + 1, wrong + (max(off) > 0.15)
            if not load.is_rate_unsure:
                judged_rates += 1
                wrong_rates += abs(load.prefill_tokens_per_s / tokens_per_s - 1.0) > 0.15
    assert judged > 400
    assert wrong <= 0.05 * judged
    assert judged_rates > 0
    assert wrong_rates <= 0.05 * judged_rates


@pytest.mark.parametrize(("step_s", "tokens_per_s"), [(0.005, 8000.0), (0.02, 8000.0), (0.02, 1900.0)])
def test_an_engine_that_computes_several_prompts_at_once(
    monkeypatch: pytest.MonkeyPatch, step_s: float, tokens_per_s: float
) -> None:
    """Its rate is not several times too low, as if each prompt's time were only its own."""
    for warm, num_streams in itertools.product((0.0, 0.9, 0.97), (1, 4, 32)):
        monkeypatch.setattr(load_module, "time", clock := Clock())
        clock.now_s = 0.0
        account = LoadAccount()
        traffic = Traffic(num_streams, warm, random.Random(num_streams), has_cold=True)
        engine = stepping(account, clock, traffic, step_s, tokens_per_s)
        ratios = []
        while clock.now_s < END_S:
            next(engine)
            if clock.now_s > SETTLED_S:
                account.current(None, BLOCK, False)
                truth_s = math.ceil(8000 / 2048) * step_s + 8000 / tokens_per_s
                ratios.append(account.line.seconds(8000) / truth_s)
        ratios.sort()
        assert 0.8 < ratios[len(ratios) // 2] < (1.1 if num_streams == 1 else 1.6), (warm, num_streams)
