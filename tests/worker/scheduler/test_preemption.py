"""Preemption: sequences lose their blocks and are computed again, and no token changes."""

from __future__ import annotations

import pytest

from tests.worker.scheduler.arithmetic_runner import answer
from tests.worker.scheduler.engine import ROOT, HandEngine, generate
from worker.wire import End


def test_the_last_is_preempted_and_gives_the_same_tokens() -> None:
    engine = HandEngine(num_blocks=8, block_size=4)
    requests = [engine.submit(generate([10 * i, 1, 2, 3], 20)) for i in range(3)]
    while engine.scheduler.has_work:
        plan = engine.step()
        assert plan is not None
        assert not (plan.num_preempted and plan.batch_growth_reason), "a step that preempts admits no sequence"
    engine.finish()
    assert engine.num_preempted > 0
    for i, request in enumerate(requests):
        assert engine.answer(request).tokens[0] == answer([10 * i, 1, 2, 3], 100, 20)
    ends = [engine.answer(request).last for request in requests]
    assert all(isinstance(end, End) for end in ends)


def test_preempting_all_allows_a_reset_and_changes_no_token() -> None:
    engine = HandEngine()
    requests = [engine.submit(generate([i, 2, 3, 4, 5], 9, n=2)) for i in range(3)]
    for _ in range(4):
        engine.step()
    assert not engine.allocator.reset()
    engine.scheduler.preempt_all()
    assert engine.allocator.reset()
    engine.finish()
    for i, request in enumerate(requests):
        assert engine.answer(request).tokens == {c: answer([i, 2, 3, 4, 5], 100 + c, 9) for c in range(2)}


def test_an_exhausted_pool_serves_all_requests() -> None:
    """Sixteen long requests exhaust the pool, and all of them are served."""
    engine = HandEngine(num_blocks=33, block_size=4, max_num_batched_tokens=32, max_num_seqs=16)
    prompts = [[i, *range(40)] for i in range(16)]  # each needs 26 of 32 blocks in the end
    requests = [engine.submit(generate(prompt, 60)) for prompt in prompts]
    engine.finish()
    assert engine.num_preempted > 0
    for prompt, request in zip(prompts, requests, strict=True):
        assert engine.answer(request).tokens[0] == answer(prompt, 100, 60)


def test_one_that_preempts_itself_is_admitted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No allocator refuses the only running sequence. If one did, the request would continue."""
    engine = HandEngine()
    request = engine.submit(generate(range(7), 6))
    engine.step()
    take, refusals = engine.allocator._take, iter([True])
    monkeypatch.setattr(
        type(engine.allocator), "_take", lambda self, count: None if next(refusals, False) else take(count)
    )
    engine.finish()
    assert engine.num_preempted == 1
    assert engine.answer(request).tokens[0] == answer(range(7), 100, 6)


def test_a_pool_that_is_held_elsewhere_is_noticed() -> None:
    engine = HandEngine()
    engine.submit(generate(range(7), 6))
    engine.step()
    num_held = engine.allocator.num_free_blocks * engine.allocator.block_size
    assert engine.allocator.allocate(num_held, range(100, 110), ROOT) is not None
    assert any(engine.step() is None for _ in range(10)), "the scheduler plans for ever, and nothing ends"
