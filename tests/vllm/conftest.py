"""One fleet for all tests: an engine takes minutes to start where it shares its cores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.vllm import horizon
from tests.vllm.fleet import VllmFleet


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that end an engine come last."""
    items.sort(key=lambda item: item.path.name in ("test_engine_lost.py", "test_engine_text.py"))


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[VllmFleet]:
    yield from run_fleet(VllmFleet(tmp_path_factory.mktemp("vllm")), request)


@pytest.fixture(scope="module")
def horizon_fleet(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[VllmFleet]:
    """Engines with the parsers of a model whose format is not in the gateway's table."""
    folder = tmp_path_factory.mktemp("horizon")
    options = horizon.options(horizon.write_model(folder / "model"))
    yield from run_fleet(VllmFleet(folder, base=options), request)


def run_fleet(fleet: VllmFleet, request: pytest.FixtureRequest) -> Iterator[VllmFleet]:
    """Yield the fleet while it runs, and report its start."""
    capture: Any = request.config.pluginmanager.get_plugin("capturemanager")

    def say(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(text, flush=True)

    say(f"\nstarting two engines, for some minutes on two cores; their logs: {fleet.folder}/e*.log")
    with fleet as running:
        say(f"ready: the engines took {' and '.join(f'{engine.start_s:.0f} s' for engine in running.engines)}")
        yield running
