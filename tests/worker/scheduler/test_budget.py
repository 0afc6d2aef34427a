"""The token budget of a step: decodes first, then the shares of the prefills."""

from __future__ import annotations

import pytest

from tests.worker.scheduler.arithmetic_runner import answer, step_tokens
from tests.worker.scheduler.engine import HandEngine, generate

SOLO = {"max_num_batched_tokens": 512, "max_solo_prefill_tokens": 2048}


@pytest.mark.parametrize("limits", [{"max_num_batched_tokens": 2048}, SOLO])
def test_a_short_prompt_starts_within_two_steps_of_a_long_one(limits: dict[str, int]) -> None:
    """A short prompt gets its first token within two steps of a prefill of 8,000 tokens."""
    engine = HandEngine(num_blocks=2500, **limits)
    engine.submit(generate([i % 50 for i in range(8000)]))
    engine.step()
    short = engine.submit(generate(range(20)))
    num_steps = 0
    while 0 not in engine.answer(short).tokens:
        engine.step()
        num_steps += 1
    assert num_steps <= 2
    assert step_tokens(engine.runner.steps[-1]) <= limits["max_num_batched_tokens"]


def test_a_solo_prefill_takes_large_steps() -> None:
    engine = HandEngine(num_blocks=2500, **SOLO)
    engine.submit(generate([i % 50 for i in range(7000)]))
    sizes = [engine.step().num_tokens, engine.step().num_tokens]
    short = engine.submit(generate(range(40, 20, -1), max_tokens=2))
    sizes += [engine.step().num_tokens for _ in range(4)]
    # solo, with another prefill, with its decode, solo again
    assert sizes == [2048, 2048, 512, 512, 7000 + 20 + 1 - 2 * 2048 - 2 * 512, 1]
    engine.finish()
    assert engine.answer(short).tokens == {0: answer(range(40, 20, -1), 100, 2)}


def test_an_admitted_request_gets_its_share() -> None:
    """An admitted request gets its share among many long prefills."""
    engine = HandEngine(num_blocks=2000, max_num_batched_tokens=64, max_num_seqs=16)
    for seed in range(10):
        engine.submit(generate([(i + seed) % 50 for i in range(600)]))
        engine.step()
    late = engine.submit(generate(range(12)))
    engine.step()
    assert 0 in engine.answer(late).tokens


def test_behind_the_oldest_prefill_the_shortest_goes_first() -> None:
    engine = HandEngine(num_blocks=600, max_num_batched_tokens=64)
    for seed in range(2):
        engine.submit(generate([seed, *(i % 50 for i in range(600))]))
        engine.step()
    short = engine.submit(generate([2, *range(49)] + [3] * 30))
    num_steps = 0
    while 0 not in engine.answer(short).tokens:
        engine.step()
        num_steps += 1
    assert num_steps == 3  # the admission share of 64, then the half that is not the oldest's


def test_every_running_choice_gets_a_token_in_every_step() -> None:
    engine = HandEngine(num_blocks=600, max_num_batched_tokens=32, max_num_seqs=8)
    early = [engine.submit(generate([i, i + 1], 30)) for i in range(4)]
    engine.step()
    engine.submit(generate([i % 50 for i in range(900)]))
    for num_tokens in range(2, 20):
        engine.step()
        assert all(len(engine.answer(request).tokens[0]) == num_tokens for request in early)
