"""Drafts are added where they save time."""

from __future__ import annotations

import random

import pytest

from tests.worker.scheduler.arithmetic_runner import ArithmeticRunner
from tests.worker.scheduler.engine import HandEngine, generate
from worker.contracts.rates import StepCost
from worker.contracts.step import SampledToken, SequenceResult, SequenceStep
from worker.scheduler.plan import StepPlan
from worker.scheduler.speculation import Speculation

PERIOD = [5, 6, 7, 8, 9, 10, 11, 12]


class PeriodicRunner(ArithmeticRunner):
    """Continues a period, where it has read the sequence right."""

    def _result(self, sequence: SequenceStep) -> SequenceResult:
        super()._result(sequence)
        rows = sequence.sampling_rows
        return SequenceResult(tuple(SampledToken(PERIOD[row.position % len(PERIOD)]) for row in rows))


def engine(speculation: Speculation | None, **limits) -> HandEngine:
    made = HandEngine(200, 4, runner=PeriodicRunner(200, 4), **limits)
    made.scheduler.speculation = speculation
    return made


def drafts(made: HandEngine) -> list[list[int]]:
    """Run to the end; return the number of draft tokens of each sequence, by step."""
    found = []
    while made.scheduler.has_work:
        plan = made.step()
        assert isinstance(plan, StepPlan)
        found.append([len(chunk.draft_ids) for chunk in plan.chunks.values()])
    return found


def test_tokens_come_several_at_a_time() -> None:
    made = engine(Speculation(6))
    request = made.submit(generate(PERIOD * 2, 40))
    steps = drafts(made)
    assert made.answer(request).tokens[0] == (PERIOD * 5)[:40]
    assert len(steps) == 1 + -(-39 // 7)
    assert made.num_accepted == 39 - (len(steps) - 1)
    assert max(map(sum, steps)) == 6


def test_right_drafts_are_charged_as_much_as_single_tokens() -> None:
    served = []
    for speculation in (None, Speculation(6)):
        made = engine(speculation)
        request, _ = (made.submit(generate(PERIOD * 2, length, tenant=f"t{length}")) for length in (40, 150))
        while made.answer(request).last is None:
            made.step()
        served.append(made.scheduler._fair_share._served["t40"])
    assert made.num_accepted
    assert served[0] == served[1]


def test_the_last_token_is_not_exceeded_and_needs_no_draft() -> None:
    made = engine(Speculation(100))
    request = made.submit(generate(PERIOD * 2, 5))
    assert drafts(made) == [[0], [3]]
    assert made.answer(request).tokens[0] == PERIOD[:5]
    continued = made.submit(generate(PERIOD * 2 + PERIOD[:5], 1))
    made.finish()
    assert continued.num_cached_tokens == 20, "the blocks of right drafts stay cached"


def test_a_token_that_stops_ends_the_draft() -> None:
    made = engine(Speculation(100), eos=(PERIOD[4],))
    request = made.submit(generate(PERIOD * 2, 50))
    drafts(made)
    assert made.answer(request).tokens[0] == PERIOD[:5]
    assert made.answer(request).finished[0].stop_token_id == PERIOD[4]
    made.finish()


def test_rows_stay_within_the_slots_and_the_pool() -> None:
    made = engine(Speculation(50), max_num_seqs=6)
    requests = [made.submit(generate(PERIOD * 2, 30)) for _ in range(4)]
    for plan in drafts(made):
        assert len(plan) + sum(plan) <= 6
    assert all(made.answer(request).tokens[0] == (PERIOD * 4)[:30] for request in requests)
    made.finish()


def test_no_drafts_while_a_prompt_is_computed() -> None:
    made = engine(Speculation(4), max_num_batched_tokens=8, max_num_seqs=8)
    made.submit(generate(PERIOD * 2, 30))
    for _ in range(4):
        made.step()
    made.submit(generate(range(60, 100), 1))
    while (plan := made.step()) is not None:
        assert not plan.num_prefill_tokens or not any(chunk.draft_ids for chunk in plan.chunks.values())
    made.finish()


class Guess(Speculation):
    """Keeps its first guess of what a step costs."""

    def measure(self, plan: StepPlan, duration_s: float) -> None:
        pass


def test_dear_rows_get_no_draft() -> None:
    """A step whose every row costs as much as the first: a draft would have to be right for certain."""
    made = engine(Guess(4, StepCost(0.01)))
    made.submit(generate(PERIOD * 2, 30))
    assert sum(map(sum, drafts(made))) == 0


def test_only_steps_of_decodes_measure_the_cost() -> None:
    speculation = Speculation(4, StepCost(0.001, 4.0))
    made = engine(Speculation(4))
    made.submit(generate(PERIOD * 2, 30))
    prefill, decode = made.step(), made.step()
    assert prefill is not None
    assert decode is not None
    speculation.measure(prefill, 5.0)
    assert made.scheduler.speculation.cost.seconds(1) > 0.0, "measured by the engine"
    assert speculation.cost.seconds(1) == pytest.approx(0.005), "the first guess"
    speculation.measure(decode, 0.05)
    assert speculation.cost.seconds(decode.num_decode_rows) == pytest.approx(0.05)


def test_one_sequence_gets_more_drafts_than_each_of_many() -> None:
    """With cheap rows, one sequence gets more drafts than each of many."""
    longest = []
    for count in (1, 12):
        made = engine(Guess(20, StepCost(0.001, 3.0)))
        for _ in range(count):
            made.submit(generate(PERIOD * 2, 30))
        longest.append(next(max(plan) for plan in drafts(made) if any(plan)))
    assert longest[0] > longest[1]


def test_the_cost_of_a_row_is_fitted() -> None:
    rng, cost = random.Random(0), StepCost(0.001, 4.0)
    assert cost.seconds(1) == pytest.approx(0.001, rel=4.0)
    for _ in range(300):
        num_rows = rng.randint(1, 12)
        cost.measure(num_rows, 0.03 + 0.002 * num_rows + rng.uniform(-0.001, 0.001))
    assert cost.row_s == pytest.approx(0.002, rel=0.1)
    assert cost.seconds(1) == pytest.approx(0.032, rel=0.1)
    assert cost.seconds(20) == pytest.approx(0.07, rel=0.1)


def test_steps_of_one_size_leave_the_first_guess() -> None:
    cost = StepCost(0.001, 4.0)
    for _ in range(100):
        cost.measure(8, 0.05)
    assert cost.row_s == pytest.approx(0.001)
    assert cost.seconds(9) == pytest.approx(0.051)


def test_a_disturbed_machine_moves_the_guess_only_so_far() -> None:
    cost = StepCost(0.001, 4.0)
    for index in range(100):
        cost.measure(1 + index % 2, 5.0 * (index % 2))
    assert cost.row_s == pytest.approx(0.003)
