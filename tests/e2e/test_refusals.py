"""A gateway's memory over sequences of large requests stays what it was at the start."""

from __future__ import annotations

import pytest

from tests.e2e.refusals import measure
from tests.refusals import cases

LONG_ROUTES = ("/v1/chat/completions", "/v1/messages", "/tokenize")


async def test_twenty_of_every_kind_leave_no_memory_behind() -> None:
    rows = await measure(cases(), 20)
    assert not [str(row) for row in rows if row.problem]


@pytest.mark.deep
async def test_two_hundred_of_every_kind_leave_no_memory_behind() -> None:
    rows = await measure([case for case in cases() if case.route in LONG_ROUTES], 200)
    assert not [str(row) for row in rows if row.problem]
