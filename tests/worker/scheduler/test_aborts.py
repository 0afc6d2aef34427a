"""Aborts free blocks, but not before the step that writes them has returned."""

from __future__ import annotations

import pytest

from tests.worker.device_streams import LateStream
from tests.worker.scheduler.arithmetic_runner import answer
from tests.worker.scheduler.engine import ROOT, HandEngine, generate


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
