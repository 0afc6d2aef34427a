from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", metavar="FOLDER", help="write pictures of the pages there")


@pytest.fixture(scope="session")
def screenshots(request: pytest.FixtureRequest) -> Path | None:
    folder = request.config.getoption("--screenshots")
    return None if folder is None else Path(str(folder))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium."""
    api = pytest.importorskip("playwright.sync_api", reason="make test-browser installs it")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium on PATH: apt-get install chromium")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()
