"""Fixtures of the fault tests, and the seed from which every random choice of theirs comes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.tiny_model import write_tiny_model


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-seed", type=int, default=1, help="what every random choice of the faults comes from")
    parser.addoption("--soak-s", type=float, default=60.0, help="how long the soak lasts")
    parser.addoption("--front-requests", type=int, default=200, help="requests around the restarts behind a front")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """aiohttp leaves the socket of a connection that is refused or given up while it is made to the collector."""
    ignored = "ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(ignored))


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--fault-seed"))


@pytest.fixture
def rng(seed: int, request: pytest.FixtureRequest) -> random.Random:
    """The same sequence whenever this test runs with this seed, by itself or among others."""
    return random.Random(f"{seed} {request.node.name}")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-llama")
