"""Aborts free blocks, but not before the step that writes them has returned."""

from __future__ import annotations

import pytest

from tests.worker.device_streams import LateStream
from tests.worker.scheduler.arithmetic_runner import answer
from tests.worker.scheduler.engine import ROOT, HandEngine, generate
from worker.wire import End


@pytest.mark.parametrize("raises", [False, True])
def test_aborted_in_flight_blocks_stay_until_the_step_returns(raises: bool) -> None:
    """A request that is aborted in flight keeps its blocks until the step returns."""
    failures = iter([raises])
    engine = HandEngine(fails=lambda step: next(failures, False), stream=LateStream())
    gone, other = engine.submit(generate(range(10))), engine.submit(generate(range(20, 30)))
    held: list[int] = []

    def abort() -> None:
        held.append(engine.allocator.num_free_blocks)
        engine.abort(gone)
        held.append(engine.allocator.num_free_blocks)

    engine.step(abort)
    assert engine.answer(gone).finished[0].reason == "abort"
    assert engine.answer(gone).last is not None
    assert held[0] == held[1] == engine.allocator.num_free_blocks - 3
    assert engine.allocator.find([*range(10), 1], ROOT) == (0 if raises else 8)
    engine.finish()
    assert engine.answer(other).tokens[0] == answer(range(20, 30), 100, 4)


def test_the_part_of_a_prefill_before_an_abort_is_none() -> None:
    """In the metrics, it would look like a short prefill."""
    engine = HandEngine(max_num_batched_tokens=8, max_num_seqs=4)
    gone = engine.submit(generate(range(40)))
    engine.step()
    engine.step()
    engine.abort(gone)
    last = engine.answer(gone).last
    assert isinstance(last, End)
    assert (last.prefill_s, last.decode_s) == (0.0, 0.0)
