"""Another revision is rolled out under load, and back: no request fails, and half of the workers serve at all times.

`pytest -m faults tests/faults/test_rollouts.py -s` prints what was seen.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import rollouts
from tests.faults.cluster import Cluster

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("redis", [True, False])
@pytest.mark.parametrize("kind", rollouts.KINDS)
@pytest.mark.parametrize("num_workers", [2, 4])
async def test_a_rollout_and_back(num_workers: int, kind: str, redis: bool, tmp_path: Path, model: Path) -> None:
    there = rollouts.args_of(kind, model, tmp_path)
    back = ["--block-size", "16", "--model", str(model)]
    topology = rollouts.topology(num_workers, num_gateways=2, redis=redis, static_workers=not redis)
    with Cluster(tmp_path / "fleet", model, topology) as cluster:
        observed = await rollouts.observe(cluster, there, back)
        print(f"{num_workers} workers, {kind}, {'registry' if redis else '--workers'}: {observed}")
        cluster.assert_quiet(within_s=20.0)
    assert not observed.failures
    assert min(observed.num_serving) >= num_workers / 2
