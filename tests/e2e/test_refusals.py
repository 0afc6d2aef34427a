"""The memory of gateways and adapters over sequences of large requests stays what it was at the start."""

from __future__ import annotations

import pytest

from tests.e2e.refusals import BODY_BYTES, MAX_GROWN_BYTES, adapters, measure
from tests.refusals import cases
from tests.worker.adapter.refused_bodies import adapter_cases

pytestmark = pytest.mark.e2e
NUM_IN_SHORT = MAX_GROWN_BYTES // BODY_BYTES + 2
"""A case that leaves each of its bodies behind is beyond the bound."""
LONG_ROUTES = ("/v1/chat/completions", "/v1/messages", "/tokenize")


async def test_some_of_every_kind_leave_no_memory_behind() -> None:
    rows = await measure(cases(), NUM_IN_SHORT)
    assert not [str(row) for row in rows if row.problem]


async def test_an_adapter_keeps_no_memory_either() -> None:
    rows = await measure(adapter_cases(), NUM_IN_SHORT, start_targets=adapters)
    assert not [str(row) for row in rows if row.problem]


@pytest.mark.deep
async def test_twenty_of_every_kind_leave_no_memory_behind() -> None:
    rows = await measure(cases(), 20)
    assert not [str(row) for row in rows if row.problem]


@pytest.mark.deep
async def test_two_hundred_of_every_kind_leave_no_memory_behind() -> None:
    rows = await measure([case for case in cases() if case.route in LONG_ROUTES], 200)
    assert not [str(row) for row in rows if row.problem]
