"""The life of a request: its prompt and cached prefix, its choices, its tokens, its end."""

from __future__ import annotations

import pytest

from tests.worker.scheduler.arithmetic_runner import answer, step_tokens
from tests.worker.scheduler.engine import HandEngine, generate
from worker.wire import End


def test_the_seconds_of_an_answer() -> None:
    engine = HandEngine()
    request = engine.submit(generate(range(10), max_tokens=5))
    for now_s in (1.0, 2.0, 3.0, 4.0, 5.0):
        plan = engine.scheduler.schedule(now_s)
        assert plan is not None
        outputs = engine.scheduler.update(plan, engine.runner.run(plan.step()), now_s)
    assert outputs[-1] == (request.key, End(queue_s=1.0, prefill_s=0.0, decode_s=4.0))


def test_a_second_request_skips_the_cached_prefix() -> None:
    engine = HandEngine()
    engine.submit(generate(range(10)))
    engine.finish()
    second = engine.submit(generate([*range(8), 40, 41]))
    assert second.num_uncached_tokens == 2
    plan = engine.step()
    assert plan is not None
    assert plan.num_tokens == 2
    assert second.num_cached_tokens == 8
    engine.finish()
    assert engine.answer(second).tokens[0] == answer([*range(8), 40, 41], 100, 4)


def test_a_stop_token_ends_the_choice_and_is_named() -> None:
    tokens = answer(range(10), 100, 8)
    engine = HandEngine(eos=[tokens[3]])
    by_eos = engine.submit(generate(range(10), 8))
    by_stop = engine.submit(generate(range(10), 8, stop_token_ids=(tokens[2],)))
    ignored = engine.submit(generate(range(10), 8, ignore_eos=True))
    engine.finish()
    first = next(i for i, token in enumerate(tokens) if token == tokens[3])
    assert engine.answer(by_eos).tokens[0] == tokens[: first + 1]
    assert engine.answer(by_eos).finished[0].stop_token_id == tokens[3]
    assert engine.answer(by_stop).finished[0].stop_token_id in tokens[2:4]
    assert engine.answer(ignored).tokens[0] == tokens
    assert engine.answer(ignored).finished[0].reason == "length"


def test_choices_share_the_prompt_until_they_differ() -> None:
    engine = HandEngine()
    request = engine.submit(generate(range(10), 6, n=4))
    engine.step()
    assert engine.allocator.num_blocks - 1 - engine.allocator.num_free_blocks == 3
    assert not engine.runner.steps[-1].copies
    engine.step()
    assert len(engine.runner.steps[-1].copies) == 3  # the last sharer writes in place
    engine.finish()
    for index in range(4):
        assert engine.answer(request).tokens[index] == answer(range(10), 100 + index, 6)
    assert sum(len(step.copies) for step in engine.runner.steps) == 3


def test_more_choices_than_a_batch_holds_run_in_groups() -> None:
    engine = HandEngine(max_num_seqs=3)
    request = engine.submit(generate(range(10), 6, n=8))
    engine.finish()
    assert all(len(step.sequences) <= 3 for step in engine.runner.steps)
    assert engine.answer(request).tokens == {i: answer(range(10), 100 + i, 6) for i in range(8)}
    assert sum(map(step_tokens, engine.runner.steps)) == 10 + 2 + 2 + 8 * 5


def test_cached_output_does_not_count_as_cached_prompt() -> None:
    """Output of a resumed request that is cached does not count as cached prompt."""
    engine = HandEngine()
    tokens = answer(range(10), 100, 12)
    engine.submit(generate(range(10), 12))
    engine.finish()
    request = engine.submit(generate(range(10), 12, resumed={0: tokens[:11]}))
    plan = engine.step()
    assert plan is not None
    assert plan.num_tokens == 1
    assert request.num_cached_tokens == 10
    engine.finish()


def test_a_choice_resumed_after_its_last_token_ends_at_once() -> None:
    tokens = answer(range(10), 100, 4)
    engine = HandEngine()
    request = engine.submit(generate(range(10), 4, resumed={0: tokens}))
    assert engine.answer(request).finished[0].reason == "length"
    assert isinstance(engine.answer(request).last, End)
    assert not engine.scheduler.has_work
    both = engine.submit(generate(range(10), 4, 2, resumed={0: tokens, 1: answer(range(10), 101, 2)}))
    assert both not in engine.step().started, "its client has Started"


def test_max_tokens_0_gives_the_prompts_logprobs_alone() -> None:
    engine = HandEngine()
    request = engine.submit(generate(range(10), 0, prompt_logprobs=0))
    engine.finish()
    got = engine.answer(request)
    assert (got.tokens, got.finished[0].reason) == ({}, "length")
    assert got.prompt_logprobs is not None
    assert [p and p.logprob for p in got.prompt_logprobs.positions] == [None, *(-float(i) for i in range(1, 10))]


def test_long_prompt_logprobs_come_in_several_frames() -> None:
    engine = HandEngine(num_blocks=200, max_num_batched_tokens=100, max_num_seqs=4)
    request = engine.submit(generate(range(600), 1, prompt_logprobs=0))
    engine.step()
    engine.scheduler.preempt_all()  # all of them are computed again
    engine.finish()
    got = engine.answer(request).prompt_logprobs
    assert got is not None
    assert [p and p.logprob for p in got.positions] == [None, *(-float(i) for i in range(1, 600))]


@pytest.mark.parametrize("prefix_cache", ["hash", "radix", "off"])
def test_prompt_logprobs_fit_into_a_pool_of_one_prompt(prefix_cache) -> None:
    """Prompt logprobs of a cached prompt fit into a pool that holds the prompt once."""
    limits = {"max_num_batched_tokens": 6, "max_num_seqs": 1}
    engine = HandEngine(num_blocks=15, block_size=4, prefix_cache=prefix_cache, **limits)
    engine.submit(generate([7] * 33, 2))
    engine.finish()
    request = engine.submit(generate([7] * 33, 2, prompt_logprobs=0))
    engine.finish(max_steps=100)
    assert engine.num_preempted == 0
    assert engine.answer(request).tokens[0] == answer([7] * 33, 100, 2)
