"""2,000 requests of every kind, with kills of workers: every figure of every page equals what clients counted."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.figures import check_figures, view_of, wait_closed
from tests.faults.usage_load import UsageFleet, check, run_load

pytestmark = pytest.mark.faults
NUM_REQUESTS = 2000


async def test_every_figure_equals_the_clients_counts(tmp_path: Path, model: Path, rng: random.Random) -> None:
    with UsageFleet(tmp_path / "fleet", model, num_workers=3, num_gateways=1) as fleet:

        def before(number: int) -> None:
            if number % 250 == 125:
                fleet.wait_ready()  # no gateway learns of a worker that dies before it is known
                worker = fleet.workers[number // 250 % 3]
                worker.kill()
                worker.start()

        done = await run_load(fleet, NUM_REQUESTS, rng, at_once=8, before=before)
        wait_closed(fleet, NUM_REQUESTS)
        print(check(fleet, done, lambda counted: False))
        print(check_figures(fleet, done))
        words = [change["what"] for change in view_of(fleet.gateways[0])["changes"]]
        # The second where the next process came before the lease of the dead one ended.
        assert words.count("died") + words.count("began a new epoch") >= NUM_REQUESTS // 250
