"""Preemption: sequences lose their blocks and are computed again, and no token changes."""

from __future__ import annotations

import pytest

from cache.allocators import PrefixCache
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


@pytest.mark.parametrize("num_batched", [64, 4])
def test_one_that_preempts_itself_is_admitted_again(monkeypatch: pytest.MonkeyPatch, num_batched: int) -> None:
    """No allocator refuses the only running sequence. If one did, the request would continue, even a prefill."""
    engine = HandEngine(max_num_batched_tokens=num_batched, max_num_seqs=4)
    request = engine.submit(generate(range(7), 12))
    engine.step()
    take, refusals = engine.allocator._take, iter([True, True])
    monkeypatch.setattr(
        type(engine.allocator), "_take", lambda self, count: None if next(refusals, False) else take(count)
    )
    engine.finish()
    assert engine.num_preempted == 2
    assert engine.answer(request).tokens[0] == answer(range(7), 100, 12)


@pytest.mark.parametrize(("prefix_cache", "num_prompt", "num_free"), [("hash", 7, 0), ("off", 20, 3)])
def test_a_pool_that_is_held_elsewhere_is_noticed(prefix_cache: PrefixCache, num_prompt: int, num_free: int) -> None:
    """Even by a prefill of several steps, which begins again."""
    engine = HandEngine(prefix_cache=prefix_cache, max_num_batched_tokens=4, max_num_seqs=4)
    engine.submit(generate(range(num_prompt), 6))
    engine.step()
    num_held = (engine.allocator.num_free_blocks - num_free) * engine.allocator.block_size
    assert engine.allocator.allocate(num_held, range(100, 110), ROOT) is not None
    assert any(engine.step() is None for _ in range(10)), "the scheduler plans for ever, and nothing ends"
