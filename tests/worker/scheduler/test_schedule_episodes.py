"""Any schedule gives every choice the tokens that it gets alone, and leaves no block allocated."""

from __future__ import annotations

import pytest

from tests.worker.scheduler.schedule_episodes import run_episode


def run_episodes(numbers: range) -> None:
    for number in numbers:
        try:
            run_episode(number)
        except Exception as error:
            raise AssertionError(f"run_episode({number}): {error}") from error


def test_any_schedule_gives_the_tokens_of_each_choice_alone() -> None:
    run_episodes(range(300))


@pytest.mark.deep
@pytest.mark.parametrize("part", range(10))
def test_any_schedule_gives_the_tokens_of_each_choice_alone_at_length(part: int) -> None:
    run_episodes(range(1000 * (part + 1), 1000 * (part + 2)))
