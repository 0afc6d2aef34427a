"""The tests of a GPU, run by `make gpu-check`: on a GPU, or in Triton's interpreter with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import interpreter

if interpreter.is_on():
    interpreter.install()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="run the last case of each test of tests/worker/gpu alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what waits for a device, and with --quick keep one case of each test."""
    ours = [item for item in items if item.get_closest_marker("gpu")]
    if not torch.cuda.is_available() and not interpreter.is_on():
        for item in ours:
            item.add_marker(pytest.mark.skip(reason="needs a GPU, or TRITON_INTERPRET=1"))
    if config.getoption("--quick", False):
        kept = {item.nodeid.partition("[")[0]: item for item in ours}
        items[:] = kept.values()


@pytest.fixture(scope="session")
def device() -> str:
    """Return the device of the models."""
    return "cpu" if interpreter.is_on() else "cuda"
