from __future__ import annotations

import pytest

from server.router.index_accuracy import IndexAccuracy


def test_a_blind_index_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    accuracy = IndexAccuracy(window=20, min_requests=10, min_tokens=100)
    for _ in range(20):
        accuracy.add(predicted=100, found=90)
    assert not accuracy.blind
    for _ in range(20):
        accuracy.add(predicted=100, found=0)
    assert accuracy.blind
    assert "0% of the predicted" in accuracy.reason
    for _ in range(20):
        accuracy.add(predicted=0, found=100)
    assert "0% of the cached tokens were predicted" in accuracy.reason
    for _ in range(20):
        accuracy.add(predicted=100, found=100)
    assert not accuracy.blind
    assert len([r for r in caplog.records if "is blind" in r.getMessage()]) == 1


def test_the_state_changes_only_on_clear_evidence() -> None:
    """Not after few requests, nor between the two limits."""
    blind, seeing = (IndexAccuracy(window=20, min_requests=10, min_tokens=100) for _ in range(2))
    for _ in range(9):
        blind.add(predicted=100, found=0)
    assert not blind.blind
    blind.add(predicted=100, found=0)
    assert blind.blind
    for accuracy in (blind, seeing):
        for _ in range(40):
            accuracy.add(predicted=100, found=50)
        assert accuracy.precision == 0.5, "of the window alone"
    assert (blind.blind, seeing.blind) == (True, False)


def test_cold_prompts_do_not_make_the_index_blind() -> None:
    accuracy = IndexAccuracy(window=20, min_requests=10, min_tokens=100)
    for _ in range(50):
        accuracy.add(predicted=0, found=0)
    assert not accuracy.blind
    assert (accuracy.precision, accuracy.recall) == (None, None), "nothing was predicted, and nothing was found"
