"""Drafts in a step that another follows change no token of any request."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worker.device_streams import LateStream, ThreadedStream
from tests.worker.scheduler.arithmetic_runner import VOCAB, answer, next_token
from tests.worker.scheduler.engine import HandEngine, generate
from worker.kernels.device import DeviceStream
from worker.scheduler.request import Request

REPEATING = next(
    prompt
    for first in range(VOCAB)
    for second in range(VOCAB)
    if next_token(prompt := [first, second, 3, 4, 5, 6, 7, first], 100) == second
)
"""A prompt whose answer begins with a pair of tokens that it contains, so that the second step has drafts."""


@pytest.fixture(params=["late", "threaded"])
def stream(request: pytest.FixtureRequest) -> Iterator[DeviceStream]:
    if request.param == "late":
        yield LateStream()
        return
    threaded = ThreadedStream()
    yield threaded
    threaded.close()


def only_drafter(engine: HandEngine) -> Request | None:
    """Return the request whose drafts the step in flight verifies, if it is the only one."""
    chunks = engine.in_flight[0][0].chunks.values() if engine.in_flight else ()
    drafting = [chunk.sequence.request for chunk in chunks if chunk.draft_ids]
    return drafting[0] if len(drafting) == 1 else None


@pytest.mark.parametrize("num_before", [0, 1, 3])
def test_abort_of_the_only_drafts_in_flight(stream: DeviceStream, num_before: int) -> None:
    """The only request with drafts is aborted while its step runs."""
    engine = HandEngine(stream=stream, max_drafts=4, num_blocks=200, max_num_seqs=12)
    engine.now_s = 1.0  # the abort comes before the next step is launched
    others = [[40 + i, 30, 20 + i] for i in range(3)]
    before = [engine.submit(generate(prompt_ids, 12)) for prompt_ids in others[:num_before]]
    gone = engine.submit(generate(REPEATING, 30))
    behind = [engine.submit(generate(prompt_ids, 12)) for prompt_ids in others[num_before:]]
    engine.step()
    engine.async_scheduling = True

    def abort() -> None:
        assert only_drafter(engine) is gone
        engine.abort(gone)

    engine.step(abort)
    assert engine.num_async == 1, "the step behind the drafts was not launched ahead"
    engine.finish()
    for prompt_ids, request in zip(others, [*before, *behind], strict=True):
        assert engine.answer(request).tokens[0] == answer(prompt_ids, 100, 12)
