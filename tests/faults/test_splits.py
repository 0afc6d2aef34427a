"""Prefill and decode apart, under kills of either side at any point: no wrong token, no lost request, no lost block.

`pytest -m faults tests/faults/test_splits.py -s` prints how many answers were split.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Final

import pytest

from tests.faults.splits import SplitCluster, bodies
from tests.faults.test_moving_blocks import Clients

pytestmark = pytest.mark.faults
NUM_KILLS: Final = 100
NUM_CLIENTS: Final = 8


async def test_a_hundred_kills_of_either_side(tmp_path: Path, model: Path, rng: random.Random) -> None:
    with SplitCluster(tmp_path, model, num_prefill=2, num_mixed=2) as cluster:
        asked = bodies(rng, times=4)
        expected = await cluster.unsplit(asked)
        clients = Clients(cluster, asked, expected, salts=True)
        tasks = [asyncio.create_task(clients.run(rng.random())) for _ in range(NUM_CLIENTS)]
        try:
            for number in range(NUM_KILLS):
                assert clients.wrong == [], f"after {number} kills"
                await asyncio.sleep(rng.uniform(0.0, 1.0))
                victim = rng.choice(cluster.workers)
                await asyncio.to_thread(victim.kill)
                victim.start()
                await asyncio.to_thread(cluster.wait_ready)
        finally:
            clients.stopping = True
            await asyncio.gather(*tasks)
        print(f"{clients.num_answers} answers, {cluster.num_splits:.0f} splits, by place: {dict(clients.places)}")
        assert clients.wrong == []
        assert cluster.num_splits > NUM_KILLS
        await asyncio.to_thread(cluster.assert_quiet, 20.0)
        for worker in cluster.workers:
            assert "Traceback" not in worker.log.read_text(errors="replace"), worker.tail()
