"""Steps that raise: only the requests to blame fail, and blocks copied in them are computed again."""

from __future__ import annotations

import pytest

from tests.worker.scheduler.arithmetic_runner import VOCAB, answer, next_token
from tests.worker.scheduler.engine import HandEngine, generate
from worker.contracts.step import NoTokenLeft
from worker.scheduler.request import ConstraintError
from worker.wire import Failed

REPEATING = next(
    prompt
    for first in range(VOCAB)
    for second in range(VOCAB)
    if next_token(prompt := [first, second, 3, 4, 5, 6, 7, first], 100) == second
)
"""A prompt whose answer begins with a pair of tokens that it contains, so that the second step has drafts."""


@pytest.mark.parametrize(
    ("error", "failed"),
    [
        (ConstraintError("no token fits"), Failed("invalid_grammar", "no token fits", retryable=False)),
        (NoTokenLeft("nothing left"), Failed("invalid_request", "nothing left", retryable=False)),
        (ValueError("/secret"), Failed("internal_error", "the request cannot be computed", retryable=False)),
    ],
)
def test_a_client_sees_only_errors_that_its_own_request_caused(error: Exception, failed: Failed) -> None:
    class Broken:
        finished = False

        def allowed(self) -> object:
            return None

        def advance(self, token_id: int) -> None:
            raise error

    engine = HandEngine()
    other = engine.submit(generate([1, 2, 3], 6))
    request = engine.submit(generate([4, 5, 6], 6, n=2), {1: Broken()})
    engine.finish()
    assert engine.answer(request).last == failed
    assert engine.scheduler.fail(request, failed) == [], "once"
    assert engine.answer(other).tokens[0] == answer([1, 2, 3], 100, 6)


def test_blocks_copied_in_a_failed_step_are_computed_again() -> None:
    """Sequences that had a block copied in a failed step are computed again."""
    failures = iter([True, True, False])
    engine = HandEngine(fails=lambda step: len(engine.runner.steps) > 1 and next(failures, False))
    request = engine.submit(generate(range(10), 6, n=3))
    other = engine.submit(generate(range(20, 27), 6, n=2))
    engine.step()
    engine.step()
    steps = engine.runner.steps
    assert [len(step.copies) for step in steps] == [0, 3, 0, 0]
    assert [len(step.sequences) for step in steps] == [2, 5, 1, 1]  # the retries are of the last sharers
    engine.finish()
    assert isinstance(engine.answer(request).last, Failed)  # retried first, it fails by itself too
    assert engine.answer(other).tokens == {i: answer(range(20, 27), 100 + i, 6) for i in range(2)}


@pytest.mark.parametrize(
    ("prefix_cache", "num_blocks", "num_tokens", "long", "short", "failing"),
    [("hash", 6, 6, (14, 1, 2), (2, 2, 2), 2), ("off", 6, 8, (16, 1, 2), (1, 3, 3), 1)],
)
def test_a_failed_step_may_have_overwritten_the_source_of_a_copy(
    prefix_cache, num_blocks, num_tokens, long, short, failing
) -> None:
    count = iter(range(1000))
    engine = HandEngine(
        num_blocks,
        prefix_cache=prefix_cache,
        max_num_batched_tokens=num_tokens,
        max_num_seqs=4,
        fails=lambda step: next(count) == failing,
    )
    asked = [([first] * length, n, max_tokens) for first, (length, n, max_tokens) in ((1, long), (11, short))]
    requests = [engine.submit(generate(prompt_ids, max_tokens, n)) for prompt_ids, n, max_tokens in asked]
    engine.finish()
    failed = engine.runner.steps[failing]
    written = {slot // 4 for sequence in failed.sequences for slot in sequence.slots}
    assert written & {copy.source for copy in failed.copies}  # the fork released it, and the prefill took it
    for (prompt_ids, n, max_tokens), request in zip(asked, requests, strict=True):
        assert engine.answer(request).tokens == {i: answer(prompt_ids, 100 + i, max_tokens) for i in range(n)}


def test_a_step_that_fails_by_its_drafts_is_retried_without() -> None:
    engine = HandEngine(max_drafts=4, num_blocks=200, fails=lambda step: any(each.is_draft for each in step.sequences))
    requests = [engine.submit(generate([*REPEATING, i, *REPEATING[:1]], 12)) for i in (30, 31)]
    requests.append(engine.submit(generate(REPEATING, 12)))
    engine.finish()
    assert engine.num_failed_steps > 0
    for request in requests:
        assert engine.answer(request).tokens[0] == answer(request.prompt_ids, 100, 12)
