"""Fixtures of all tests here: the tools of `make test-k8s`, and the chart rendered once per set of values."""

from __future__ import annotations

import pytest

from tests.k8s.tools import DEST


@pytest.fixture(scope="session", autouse=True)
def installed() -> None:
    """A missing tool is no passed test."""
    if not (DEST / "helm3").exists():
        pytest.fail("the tools of these tests are not installed: run `make test-chart`", pytrace=False)
