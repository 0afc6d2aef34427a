"""With a cluster secret, whoever writes to Redis without it costs prefix hits and nothing else: the short form."""

from __future__ import annotations

import random
from pathlib import Path

from tests.faults.forged_redis import beside_a_forger, secret_cluster


async def test_a_moment_beside_a_forger(tmp_path: Path, tiny_model: Path) -> None:
    with secret_cluster(tmp_path, tiny_model, static_workers=False) as cluster:
        await beside_a_forger(cluster, random.Random(1), 5.0, 40)
