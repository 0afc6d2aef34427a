"""With a cluster secret, whoever writes to Redis without it, or spoils its replies, costs prefix hits only."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.forged_redis import besieged, with_a_forger


@pytest.mark.parametrize("static_workers", [True, False], ids=["told", "found"])
async def test_a_minute_with_a_forger(tmp_path: Path, model: Path, rng: random.Random, static_workers: bool) -> None:
    with besieged(tmp_path, model, static_workers=static_workers) as (cluster, proxies):
        await with_a_forger(cluster, proxies, rng, 60.0, 200)
