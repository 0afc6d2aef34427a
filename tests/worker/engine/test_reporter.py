from __future__ import annotations

import pytest

from cache.records import WorkerLoad
from cache.types import GatewayId
from tests.worker.scheduler.engine import MEMBER, HandEngine, generate
from worker.contracts.metrics import WorkerMetrics
from worker.contracts.rates import PrefillRate
from worker.engine.reporter import Reporter


def reported(reporter: Reporter) -> WorkerLoad:
    reporter.report()
    return reporter.load


def test_without_a_measurement_there_is_no_rate() -> None:
    rate = PrefillRate()
    assert rate.tokens_per_s == 0.0
    assert rate.seconds(100) == 0.0


def test_the_rate_follows_what_is_measured_and_forgets() -> None:
    rate = PrefillRate(1000, 1.0)
    rate.add(500, 1.0, 1.0)
    assert 500.0 < rate.tokens_per_s < 1000.0
    for second in range(300):
        rate.add(100, 1.0, 2.0 + second)
    assert rate.tokens_per_s == pytest.approx(100.0, rel=0.01)
    assert rate.seconds(50) == pytest.approx(0.5, rel=0.01)


def test_an_old_measurement_yields_to_a_new_one() -> None:
    slow = PrefillRate()
    for second in range(60):
        slow.add(100, 1.0, 1.0 + second)
    assert slow.tokens_per_s == pytest.approx(100.0)
    slow.add(1000, 1.0, 3600.0)
    assert slow.tokens_per_s == pytest.approx(1000.0, rel=0.01)


def test_short_prefills_do_not_look_slow() -> None:
    """A worker whose prompts are cached runs short steps, mostly their fixed part."""
    rate = PrefillRate(1000, 1.05, step_tokens=50.0)
    assert rate.tokens_per_s == pytest.approx(1000.0)
    for second in range(200):
        rate.add(10, 0.06, 2.0 + second)
    assert rate.tokens_per_s == pytest.approx(1000.0)
    for second in range(2000):
        rate.add(10, 0.12, 300.0 + second)
    assert rate.tokens_per_s == pytest.approx(500.0, rel=0.01)


def test_queued_seconds_shrink_with_every_chunk() -> None:
    """They end with the first token."""
    engine = HandEngine(num_blocks=600, max_num_batched_tokens=64)
    reporter = Reporter(engine.scheduler, PrefillRate(100, 1.0), WorkerMetrics())
    reporter.assign(engine.submit(generate([1] * 160, 5, gateway_id="a")))
    reporter.assign(engine.submit(generate([2] * 10, 5, gateway_id="b")))

    def queued() -> dict[GatewayId, float]:
        return dict(reported(reporter).queued_prefill_s)

    assert queued() == pytest.approx({"a": 1.6, "b": 0.1})
    engine.step()  # 64 tokens: 10 are b's
    assert queued() == pytest.approx({"a": 1.06})
    engine.step()
    assert queued() == pytest.approx({"a": 0.43})  # one was b's decode
    engine.step()
    assert queued() == {}
    assert reported(reporter).assigned_prefill_s == pytest.approx(1.7)
    fixed = Reporter(engine.scheduler, PrefillRate(1000, 1.05, step_tokens=50.0), WorkerMetrics())
    assert reported(fixed).prefill_fixed_s == pytest.approx(0.05)
    reporter.begin_epoch(MEMBER)
    assert reported(reporter).assigned_prefill_s == 0.0


def test_a_running_prefill_counts_all_its_blocks() -> None:
    """It allocates chunk by chunk, and admission reserves the blocks that it will need."""
    engine = HandEngine(num_blocks=600, max_num_batched_tokens=64)
    reporter = Reporter(engine.scheduler, PrefillRate(), WorkerMetrics())
    allocator = engine.scheduler.allocator

    def num_held() -> int:
        load = reported(reporter)
        return num_free - load.num_free_blocks

    num_free = allocator.num_free_blocks
    engine.submit(generate([1] * 160, 5))
    assert num_held() == 0, "it waits"
    engine.step()
    assert num_free - allocator.num_free_blocks < allocator.num_blocks_for(160)
    assert num_held() == allocator.num_blocks_for(160)
    engine.finish()
    assert num_held() == 0


def test_cached_tokens_are_not_queued() -> None:
    engine = HandEngine()
    engine.submit(generate(range(40)))
    engine.finish()
    reporter = Reporter(engine.scheduler, PrefillRate(10, 1.0), WorkerMetrics())
    reporter.assign(engine.submit(generate([*range(40), 7])))
    assert reported(reporter).queued_prefill_s == pytest.approx({"g": 0.1})


def test_decode_steps_do_not_measure_prefill() -> None:
    engine = HandEngine()
    reporter = Reporter(engine.scheduler, PrefillRate(), WorkerMetrics())
    engine.submit(generate(range(10), 4))
    plan = engine.step()
    assert plan is not None
    reporter.measure(plan, 0.5, 1.0)
    assert reporter.rate.tokens_per_s == pytest.approx(20.0)
    assert reported(reporter).prefill_fixed_s == 0.0
    plan = engine.step()
    assert plan is not None
    reporter.measure(plan, 0.5, 1.0)
    assert reporter.rate.tokens_per_s == pytest.approx(20.0)
