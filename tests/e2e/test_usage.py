"""The usage log of a fleet, and every figure it shows, equal what its clients counted, with a worker killed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.figures import check_figures, view_of, wait_closed
from tests.faults.usage_load import UsageFleet, check, run_load
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e
NUM_REQUESTS = 150


async def test_the_log_equals_the_clients_counts(tmp_path: Path, tiny_model: Path) -> None:
    with UsageFleet(tmp_path / "fleet", tiny_model, num_workers=2, num_gateways=1) as fleet:

        def before(number: int) -> None:
            if number == 60:
                fleet.named("w0").kill()

        done = await run_load(fleet, NUM_REQUESTS, random.Random(7), at_once=6, before=before)
        wait_closed(fleet, NUM_REQUESTS)
        print(check(fleet, done, lambda counted: False))
        print(check_figures(fleet, done))
        gateway = fleet.gateways[0]
        wait_until(lambda: ("w0", "died") in [(each["worker"], each["what"]) for each in view_of(gateway)["changes"]])
        (dead,) = [row for row in view_of(gateway)["workers"] if row["worker"] == "w0"]
        assert (dead["state"], dead["since"] > 0.0) == ("dead", True)
        assert len(fleet.files()) > 1, "the log was rotated"
        answered = [each for each in done if each.amounts is not None]
        assert len(answered) > NUM_REQUESTS // 2
