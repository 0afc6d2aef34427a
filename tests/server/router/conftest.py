"""A fleet of three workers."""

from __future__ import annotations

import pytest

from tests.server.router.fleets import Fleets, member


@pytest.fixture
def three() -> Fleets:
    fleets = Fleets()
    for name in "abc":
        fleets.index.register(member(name))
    return fleets
