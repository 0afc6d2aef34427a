"""With a cluster secret, whoever writes to Redis without it costs prefix hits and nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.forged_redis import secret_cluster, with_a_forger

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("static_workers", [True, False], ids=["told", "found"])
async def test_a_minute_with_a_forger(tmp_path: Path, model: Path, rng: random.Random, static_workers: bool) -> None:
    with secret_cluster(tmp_path, model, static_workers=static_workers) as cluster:
        await with_a_forger(cluster, rng, 60.0, 200)
