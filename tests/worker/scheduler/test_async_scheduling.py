"""Async scheduling: steps launched before the tokens of the step before are known."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worker.device_streams import LateStream
from tests.worker.scheduler.arithmetic_runner import answer
from tests.worker.scheduler.engine import FAILED, ROOT, HandEngine, generate
from worker.wire import Grammar

PROMPT = list(range(10))


def engine(**options: Any) -> HandEngine:
    return HandEngine(stream=LateStream(), async_scheduling=True, **options)


def test_every_decode_follows_the_step_before() -> None:
    ahead = engine()
    requests = [ahead.submit(generate([i, *PROMPT], 8)) for i in range(3)]
    ahead.finish()
    for i, request in enumerate(requests):
        assert ahead.answer(request).tokens[0] == answer([i, *PROMPT], 100, 8)
    steps = ahead.runner.steps
    assert len(steps) == 8  # none is wasted: each is known to end with its eighth token
    assert [{sequence.follows for sequence in step.sequences} for step in steps] == [{None}, *[{0, 1, 2}] * 7]


def test_a_token_after_the_stop_is_dropped() -> None:
    expected = answer(PROMPT, 100, 12)
    stop = expected[5]
    first = expected.index(stop)
    ahead = engine(eos=(stop,))
    request = ahead.submit(generate(PROMPT, 12))
    ahead.finish()
    got = ahead.answer(request)
    assert got.tokens[0] == expected[: first + 1]
    assert (got.finished[0].reason, got.finished[0].stop_token_id) == ("stop", stop)
    assert len(ahead.runner.steps) == first + 2  # one is wasted
    token_ids = [*PROMPT, *expected]
    num_written = len(PROMPT) + first + 1
    assert ahead.allocator.find(token_ids, ROOT) == num_written // 4 * 4  # only the tokens that were sent


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.1},
        {"frequency_penalty": 0.1},
        {"presence_penalty": -0.1},
        {"bad_words": ((1, 2),)},
        {"min_tokens": 12},
        {"prompt_logprobs": 0},
        {"grammar": Grammar("regex", "a*")},
        {"is_suspect": True},
        {"n": 2},
    ],
)
def test_dependent_steps_are_not_scheduled_ahead(params: dict[str, Any]) -> None:
    """A step that depends on sampled tokens is not scheduled ahead."""
    ahead = engine()
    ahead.submit(generate(PROMPT, 12, **params))
    ahead.submit(generate([7, *PROMPT], 12))
    ahead.step()
    assert ahead.num_async == 0
    ahead.finish()


def test_scheduling_ahead_delays_no_admission() -> None:
    ahead = engine()
    ahead.submit(generate(PROMPT, 20))
    for _ in range(3):
        ahead.step()
    assert ahead.num_async == 3
    late = ahead.submit(generate([7, *PROMPT], 2))
    ahead.step()  # launched before it arrived
    assert late.started_s is None
    ahead.step()
    assert late.started_s is not None
    ahead.finish()


def test_waiting_requests_do_not_stop_scheduling_ahead() -> None:
    """While all choices run, steps are scheduled ahead although requests wait."""
    ahead = engine(max_num_seqs=2)
    first, *rest = (ahead.submit(generate([i, *PROMPT], 6 + 3 * i)) for i in range(3))
    while ahead.answer(first).last is None:
        ahead.step()
    assert ahead.num_async == 5  # all of its decodes, and none after it, when its end is known
    assert not ahead.in_flight
    ahead.step()
    assert rest[1].started_s is not None
    ahead.finish()
    assert [ahead.answer(request).tokens[0] for request in (first, *rest)] == [
        answer([i, *PROMPT], 100, 6 + 3 * i) for i in range(3)
    ]


def test_steps_scheduled_ahead_count_for_max_waiting_tokens() -> None:
    ahead = engine(max_num_seqs=2, waiting_served_ratio=2.0, max_waiting_tokens=6)
    first, _ = (ahead.submit(generate([i, *PROMPT], 12 + 8 * i)) for i in range(2))
    ahead.submit(generate([7, *PROMPT], 2))  # one of two that must be admitted together
    while ahead.answer(first).last is None:
        ahead.step()
    assert ahead.num_async > 6
    plan = ahead.step()
    assert plan is not None
    assert plan.batch_growth_reason == "wait_exceeded"
    ahead.finish()


def test_a_poisoned_async_step_fails_only_its_request() -> None:
    """A poisoned step that follows another fails only its own request."""
    outputs = {i: answer([i, *PROMPT], 100, 8) for i in range(2)}
    poison = next(token for token in outputs[0][:6] if token not in outputs[1] and token > 10)

    ahead = engine()
    ahead.runner.fails = lambda step: any(
        ahead.runner.last[sequence.follows].sampled[0].token_id == poison
        if sequence.follows is not None
        else poison in sequence.token_ids
        for sequence in step.sequences
    )
    bad, good = (ahead.submit(generate([i, *PROMPT], 8)) for i in range(2))
    ahead.finish()
    assert ahead.answer(bad).last == FAILED
    assert ahead.answer(good).tokens[0] == outputs[1]
