"""2,000 requests of every kind, with kills of workers and gateways: the usage log equals what clients counted."""

from __future__ import annotations

import random
import time
from pathlib import Path

from tests.faults.usage_load import Counted, UsageFleet, check, run_load
from tests.waiting import wait_until

NUM_REQUESTS = 2000
LOST_S = 1.0
"""A killed gateway may lose the lines of its last second."""
SEEN_S = 5.0
"""A client may read the end of an answer this long after its gateway was killed."""


async def test_the_log_equals_the_clients_counts(tmp_path: Path, model: Path, rng: random.Random) -> None:
    killed: list[tuple[str, float]] = []
    with UsageFleet(tmp_path / "fleet", model, num_workers=3, num_gateways=2) as fleet:

        def before(number: int) -> None:
            if number % 250 == 125:
                worker = fleet.workers[number // 250 % 3]
                worker.kill()
                worker.start()
            if number % 600 == 400:
                gateway = fleet.gateways[number // 600 % 2]
                killed.append((gateway.name, time.time()))
                gateway.kill()
                gateway.start()
                wait_until(lambda: gateway.num_ready() > 0)

        def may_lack(counted: Counted) -> bool:
            """Its gateway was killed while it was open, or at most a second after its end."""
            ends = [counted.ended_s - at_s for name, at_s in killed if name == counted.gateway]
            is_cut = counted.amounts is None and counted.status in (0, 200)
            return any(-LOST_S <= end_s <= SEEN_S for end_s in ends) or (is_cut and bool(ends))

        done = await run_load(fleet, NUM_REQUESTS, rng, at_once=8, before=before)
        for gateway in fleet.gateways:
            gateway.send(15)
            assert gateway.wait() == 0, "a gateway that stops writes the rest"
        assert len(killed) == 3
        print(check(fleet, done, may_lack))
