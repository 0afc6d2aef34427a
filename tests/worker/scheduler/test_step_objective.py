"""An objective for the time of a step bounds the prefill next to decodes, and nothing else."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.scheduler.arithmetic_runner import ArithmeticRunner
from tests.worker.scheduler.engine import HandEngine, generate
from worker.scheduler.budget import BatchLimits, PrefillBudget
from worker.scheduler.plan import StepPlan
from worker.scheduler.request import Request
from worker.scheduler.step_objective import StepObjective

BLOCK_SIZE = 4
FIXED_S, DECODE_S, TOKEN_S, POSITION_S = 0.012, 0.0005, 0.0001, 5e-8
OBJECTIVE_S = 0.045
ENGINE = {"num_blocks": 4000, "max_num_batched_tokens": 512, "max_num_seqs": 16}


def prompt(length: int, seed: int) -> list[int]:
    return [(i * 7 + seed * 13 + i // 50) % 50 for i in range(length)]


def seconds(plan: StepPlan, noise: float = 1.0) -> float:
    """The time of a step on the machine of these tests."""
    prefills = [chunk for chunk in plan.chunks.values() if chunk.is_prefill]
    prefill_s = sum(c.num_tokens * (TOKEN_S + POSITION_S * (c.start + c.stop) / 2) for c in prefills)
    return noise * (FIXED_S + DECODE_S * plan.num_decodes + prefill_s)


def new_engine(objective: StepObjective | None) -> HandEngine:
    return HandEngine(block_size=BLOCK_SIZE, objective=objective, **ENGINE)


def decoding(engine: HandEngine, count: int, max_tokens: int) -> list[Request]:
    requests = [engine.submit(generate(prompt(8, i), max_tokens)) for i in range(count)]
    while any(not engine.answer(request).tokens for request in requests):
        step(engine)
    for _ in range(10):
        step(engine)
    return requests


def step(engine: HandEngine, noise: float = 1.0) -> StepPlan:
    """Run a step, and measure it on the machine of these tests."""
    plan = engine.step()
    assert plan is not None
    if engine.scheduler.objective is not None:
        engine.scheduler.objective.measure(plan.num_decode_rows, plan.prefills, seconds(plan, noise))
    return plan


def test_a_step_without_decodes_is_not_bound() -> None:
    limits = BatchLimits(max_num_batched_tokens=512)
    objective = StepObjective(1e-6, BLOCK_SIZE, TOKEN_S, 100.0)
    free = PrefillBudget.for_step(limits, num_decodes=0, num_prefills=2)
    unbound = PrefillBudget.for_step(limits, num_decodes=0, num_prefills=2, objective=objective)
    assert (unbound.total, unbound.objective) == (free.total, None)
    bound = PrefillBudget.for_step(limits, num_decodes=3, num_prefills=2, objective=objective)
    assert bound.total == BLOCK_SIZE
    free.drop_decode()
    assert (free.total, free.left) == (unbound.total + 1, unbound.left + 1)


@given(
    st.floats(1e-4, 10.0),
    st.integers(1, 64),
    st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 30_000), st.none() | st.integers(0, 500)), max_size=8),
    st.none() | st.integers(1, 600),
)
def test_grants_stay_within_the_budget(
    max_step_s: float, num_decodes: int, asked: list[tuple[int, int, int | None]], max_prefill: int | None
) -> None:
    """The first prefill gets a block; all others share what is left of the time, never more than the step's tokens."""
    objective = StepObjective(max_step_s, BLOCK_SIZE, TOKEN_S, 50.0)
    limits = BatchLimits(max_num_batched_tokens=512, max_batch_prefill_tokens=max_prefill)
    budget = PrefillBudget.for_step(limits, num_decodes=num_decodes, num_prefills=len(asked), objective=objective)
    free = PrefillBudget.for_step(limits, num_decodes=num_decodes, num_prefills=len(asked))
    promised = min(BLOCK_SIZE, free.total)
    assert promised <= budget.total <= free.total
    granted = []
    for wanted, start, cap in asked:
        before = budget.left
        granted.append(num_tokens := budget.take(wanted, start, cap))
        assert 0 <= num_tokens <= wanted
        assert 0 <= budget.left <= before
        budget.give_back(num_tokens, start)
        assert budget.left <= budget.total
        budget.take(num_tokens, start)
    if granted:
        assert granted[0] >= min(asked[0][0], promised)
        assert sum(granted) <= max(budget.total, promised) + promised
        assert objective.decode_s(num_decodes) + sum(granted) * TOKEN_S <= max_step_s or budget.total == promised


def test_without_a_first_guess_the_rates_are_measured() -> None:
    engine = new_engine(StepObjective(OBJECTIVE_S, BLOCK_SIZE))
    decoding(engine, 4, 1000)
    engine.submit(generate(prompt(6000, 1), 1))
    plans = [step(engine) for _ in range(8)]
    assert plans[0].num_prefill_tokens == ENGINE["max_num_batched_tokens"] - 4
    assert all(seconds(plan) < OBJECTIVE_S for plan in plans[2:])


def test_ninety_nine_of_a_hundred_steps_are_within() -> None:
    """Although the first guess of the rates is wrong, and tokens far into a prompt cost more."""
    rng = random.Random(0)
    objective = StepObjective(OBJECTIVE_S, BLOCK_SIZE, TOKEN_S / 3, 10.0)
    engine = new_engine(objective)
    decoding(engine, 4, 5000)
    durations, used = [], []
    for number in range(16):
        request = engine.submit(generate(prompt(rng.choice([30, 300, 3000]), 100 + number), 1))
        while engine.answer(request).last is None:
            factor = max(0.5, rng.gauss(1.0, 0.08))
            plan = step(engine, factor)
            assert plan.num_decodes >= 4
            durations.append(step_s := seconds(plan, factor))
            if sum(sequence.num_pending for sequence in engine.scheduler.running) > 1000:
                used.append(step_s)
    late = sum(step_s > OBJECTIVE_S for step_s in durations[20:])
    assert late <= 0.015 * len(durations)
    assert sum(used) / len(used) > 0.75 * OBJECTIVE_S, "the room is used"


def test_tokens_far_into_a_prompt_are_worth_more_first_ones() -> None:
    objective = StepObjective(1e-6, BLOCK_SIZE, TOKEN_S)
    for start in (0, 1000) * 50:
        prefill_s = BLOCK_SIZE * TOKEN_S * (1.0 + start / 250)
        objective.measure(1, [range(start, start + BLOCK_SIZE)], objective.decode_s(1) + prefill_s)
    first_s, middle_s = objective.token_s(0.0), objective.token_s(1500.0)
    assert middle_s > 4.0 * first_s
    assert objective.worth(1000, 1000) == pytest.approx(1000 * middle_s / first_s, abs=1.0)


def test_a_stalled_machine_does_not_end_prefills() -> None:
    sizes: list[list[int]] = []
    for stall in (1.0, 100.0):
        engine = new_engine(StepObjective(OBJECTIVE_S, BLOCK_SIZE, TOKEN_S, FIXED_S / TOKEN_S))
        decoding(engine, 2, 3000)
        engine.submit(generate(prompt(14_000, 9), 1))
        sizes.append([step(engine, stall if number == 50 else 1.0).num_prefill_tokens for number in range(100)])
    calm, stalled = sizes
    assert min(stalled[51:]) > min(calm) // 4
    assert stalled[-1] > 0.7 * calm[-1]


def test_decodes_go_on_next_to_a_long_prefill() -> None:
    """However short the objective is, a step has a token of every decode and a block of the prompt."""
    engine = new_engine(StepObjective(1e-6, BLOCK_SIZE, TOKEN_S, 10.0))
    early = decoding(engine, 3, 400)
    lengths = [len(engine.answer(request).tokens[0]) for request in early]
    late = engine.submit(generate(prompt(600, 5), 1))
    num_steps = 0
    while engine.answer(late).last is None:
        plan = step(engine)
        num_steps += 1
        assert plan.num_decodes == 3
        assert plan.num_prefill_tokens == BLOCK_SIZE
        assert [len(engine.answer(request).tokens[0]) for request in early] == [n + num_steps for n in lengths]
    assert num_steps == 600 // BLOCK_SIZE


def test_drafts_do_not_make_decodes_slower() -> None:
    """A step with drafts has more rows, each of which costs what a decode does."""
    objective = StepObjective(OBJECTIVE_S, BLOCK_SIZE, DECODE_S, FIXED_S / DECODE_S)
    runner = ArithmeticRunner(ENGINE["num_blocks"], BLOCK_SIZE, window=1)  # its answers go in circles
    engine = HandEngine(block_size=BLOCK_SIZE, max_drafts=4, runner=runner, **ENGINE)
    engine.submit(generate(prompt(8, 1), 200))
    num_drafted = 0
    while (plan := engine.step()) is not None:
        num_drafts = sum(len(chunk.draft_ids) for chunk in plan.chunks.values())
        num_drafted += num_drafts
        duration_s = FIXED_S + DECODE_S * (plan.num_tokens + num_drafts)
        objective.measure(plan.num_decode_rows, plan.prefills, duration_s)
    assert num_drafted > 20
    assert objective.decode_s(1) == pytest.approx(FIXED_S + DECODE_S, rel=0.02)


def test_the_rate_next_to_decodes_is_what_a_prefill_gets() -> None:
    objective = StepObjective(OBJECTIVE_S, BLOCK_SIZE, TOKEN_S, FIXED_S / TOKEN_S)
    engine = new_engine(objective)
    decoding(engine, 4, 2000)
    engine.submit(generate(prompt(14_000, 3), 1))
    plans = [step(engine) for _ in range(60)][-30:]
    rate = sum(plan.num_prefill_tokens for plan in plans) / sum(map(seconds, plans))
    assert objective.prefill_tokens_per_s(4, 508) == pytest.approx(rate, rel=0.15)
    assert objective.prefill_tokens_per_s(4, 8) < objective.prefill_tokens_per_s(4, 508)
