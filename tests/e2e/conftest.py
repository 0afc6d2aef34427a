from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.serving import Serve
from tests.tiny_model import write_tiny_model


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--prefix-cache",
        default="hash",
        choices=("hash", "radix", "off"),
        help="what the shared server is started with",
    )


@pytest.fixture(scope="session")
def prefix_cache(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--prefix-cache"))


@pytest.fixture(scope="session")
def smollm2(prefix_cache: str) -> Iterator[Serve]:
    """The default server, shared by every test that does not break it."""
    with Serve("--prefix-cache", prefix_cache) as serve:
        yield serve


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama with SmolLM2's tokenizer and template, for tests of machinery."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-llama")
