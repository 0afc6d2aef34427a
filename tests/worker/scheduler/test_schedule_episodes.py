"""Any schedule gives every choice the tokens of a run by itself, and leaves no block allocated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.worker.scheduler.episode_models import EXACT, EpisodeModel, load_tiny
from tests.worker.scheduler.schedule_episodes import run_episode

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Sequence[EpisodeModel]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    return load_tiny(folder)


IN_SHORT = {1: range(160, 190), 3: range(270, 300)}
"""Episodes of the short run, by threads. In some, the only request with drafts is aborted in flight."""


@pytest.fixture(params=[1, 3], ids=["one_thread", "three_threads"])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def run_episodes(numbers: range, models: Sequence[EpisodeModel] = EXACT) -> None:
    for number in numbers:
        try:
            run_episode(number, models)
        except Exception as error:
            raise AssertionError(f"run_episode({number}): {error}") from error


def test_no_schedule_changes_a_token() -> None:
    run_episodes(range(300))


def test_no_schedule_of_a_tiny_model_changes_a_token(tiny: Sequence[EpisodeModel], num_threads: int) -> None:
    run_episodes(IN_SHORT[num_threads], tiny)


@pytest.mark.deep
@pytest.mark.parametrize("part", range(10))
def test_deep_schedules_change_no_token(part: int) -> None:
    run_episodes(range(1000 * (part + 1), 1000 * (part + 2)))


@pytest.mark.deep
@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("part", range(10))
def test_deep_schedules_of_a_tiny_model_change_no_token(tiny: Sequence[EpisodeModel], part: int) -> None:
    run_episodes(range(100 * part, 100 * (part + 1)), tiny)
