"""TGI's options: when sequences may join the running batch, and how many."""

from __future__ import annotations

import pytest

from tests.worker.scheduler.arithmetic_runner import answer
from tests.worker.scheduler.engine import HandEngine, generate
from worker.scheduler.budget import BatchLimits, PrefillBudget


def started(engine: HandEngine, requests) -> int:
    return sum(request.started_s is not None for request in requests)


def test_a_small_group_waits_until_it_is_large_enough() -> None:
    engine = HandEngine(num_blocks=400, waiting_served_ratio=1.2, max_waiting_tokens=1000)
    for i in range(4):
        engine.submit(generate([i], 100))
    assert engine.step().batch_growth_reason == "idle"
    late = []
    for i in range(3):  # floor(4 * 1.2) = 4 are wanted
        late.append(engine.submit(generate([10 + i], 50)))
        assert engine.step().batch_growth_reason is None
        assert started(engine, late) == 0
    late.append(engine.submit(generate([20], 50)))
    assert engine.step().batch_growth_reason == "backpressure"
    assert started(engine, late) == 4
    engine.finish()
    assert [engine.answer(request).tokens[0] for request in late] == [
        answer(request.prompt_ids, 100, 50) for request in late
    ]


def test_after_max_waiting_tokens_any_number_is_admitted() -> None:
    engine = HandEngine(num_blocks=400, waiting_served_ratio=1.2, max_waiting_tokens=6)
    for i in range(4):
        engine.submit(generate([i], 100))
    engine.step()
    late = engine.submit(generate([10], 50))
    for _ in range(5):  # as TGI: the count begins at 1 with the prefill, and each decode adds 1
        assert engine.step().batch_growth_reason is None
    assert engine.step().batch_growth_reason == "wait_exceeded"
    assert started(engine, [late]) == 1
    second = engine.submit(generate([11], 50))
    for _ in range(4):  # the step that admitted was a decode too
        assert engine.step().batch_growth_reason is None
    assert engine.step().batch_growth_reason == "wait_exceeded"
    assert started(engine, [second]) == 1


def test_a_group_that_does_not_fit_whole_stays_in_the_queue() -> None:
    engine = HandEngine(num_blocks=41, waiting_served_ratio=1.0, max_waiting_tokens=1000, watermark=0.0)
    for i in range(3):
        engine.submit(generate([i] * 20, 30))
    engine.step()
    free_blocks = engine.allocator.num_free_blocks
    small, large = engine.submit(generate([10] * 8, 8)), engine.submit(generate([11] * 100, 8))
    third = engine.submit(generate([12] * 8, 8))
    engine.step()
    assert started(engine, [small, large, third]) == 0  # one of three fits before the large one
    assert len(engine.scheduler.waiting) == 3, "it has gone back"
    assert engine.allocator.num_free_blocks <= free_blocks
    engine.allocator.check_integrity()
    engine.finish()


def test_a_group_that_may_not_run_evicts_nothing() -> None:
    engine = HandEngine(num_blocks=60, max_num_seqs=5, waiting_served_ratio=1.2, max_waiting_tokens=1000)
    engine.submit(generate(list(range(100)), 1))
    engine.finish()
    for i in range(4):
        engine.submit(generate([i], 60))
    engine.step()
    for i in range(4):  # as many as are wanted, of which one may run
        engine.submit(generate([10 + i] * 20, 4))
    for _ in range(20):
        assert engine.step().batch_growth_reason is None
    assert engine.allocator.stats().evictions == 0
    engine.finish()


def test_prefill_tokens_of_a_step_are_limited() -> None:
    engine = HandEngine(num_blocks=400, max_num_batched_tokens=200, max_batch_prefill_tokens=24)
    decoding = engine.submit(generate([1], 50))
    engine.step()
    engine.submit(generate(list(range(40)) * 2, 2))
    plan = engine.step()
    assert (plan.num_prefill_tokens, plan.num_decodes) == (24, 1)
    budget = PrefillBudget.for_step(engine.scheduler.limits, num_decodes=1, num_prefills=1)
    budget.drop_decode()
    assert budget.left == 24
    engine.finish()
    assert engine.answer(decoding).tokens[0] == answer([1], 100, 50)


def test_total_tokens_of_the_running_are_limited() -> None:
    engine = HandEngine(num_blocks=400, max_batch_total_tokens=100)
    first = engine.submit(generate([1] * 10, 30))
    second = engine.submit(generate([2] * 10, 50))
    third = engine.submit(generate([3] * 10, 10))
    engine.step()
    assert started(engine, [first, second]) == 2  # 40 + 60
    assert started(engine, [third]) == 0
    while started(engine, [third]) == 0:
        engine.step()
    assert engine.answer(first).last is not None
    engine.finish()


def test_total_tokens_count_each_choice_of_the_first_request() -> None:
    engine = HandEngine(num_blocks=400, max_batch_total_tokens=100)
    request = engine.submit(generate([1] * 10, 40, n=4))
    engine.step()
    assert [len(sequence.choices) for sequence in engine.scheduler.running] == [1, 1]  # 50 + 50
    engine.finish()
    assert engine.answer(request).tokens == {i: answer([1] * 10, 100 + i, 40) for i in range(4)}


def test_without_the_ratio_requests_are_admitted_at_once() -> None:
    engine = HandEngine(num_blocks=400)
    for i in range(4):
        engine.submit(generate([i], 10))
    engine.step()
    engine.submit(generate([9], 10))
    assert engine.step().batch_growth_reason == "chunking"


def test_invalid_limits_are_named() -> None:
    limits = {"max_num_batched_tokens": 10, "max_num_seqs": 11}
    with pytest.raises(ValueError, match=next(iter(limits))):
        BatchLimits(**limits)


def test_a_refused_group_gives_its_tokens_to_the_prefills() -> None:
    engine = HandEngine(
        num_blocks=61, waiting_served_ratio=2.0, max_waiting_tokens=1000, watermark=0.0, max_num_batched_tokens=64
    )
    engine.submit(generate([1] * 200, 30))
    engine.step()
    group = [engine.submit(generate([10] * 8, 8)), engine.submit(generate([11] * 100, 8))]
    plan = engine.step()
    assert started(engine, group) == 0
    assert plan.num_prefill_tokens == 64
    engine.finish()
