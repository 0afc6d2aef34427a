"""Another revision is rolled out under load, and back: no request fails, and half of the workers serve at all times.

`pytest -m faults tests/faults/test_rollouts.py -s` prints what was seen.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.faults import rollouts
from tests.faults.cluster import Cluster

LEASE_S = 6.0


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


@pytest.mark.parametrize("num_workers", [2, 4])
async def test_a_rollout_by_kills(num_workers: int, tmp_path: Path, model: Path) -> None:
    """A killed worker takes its streams along only where no other of its revision is left; the rest is retried.

    A request that is sent at a kill is answered within a lease.
    """
    there = rollouts.args_of("revision", model, tmp_path)
    back = ["--block-size", "16", "--model", str(model)]
    with Cluster(tmp_path / "fleet", model, rollouts.topology(num_workers, num_gateways=2, redis=True)) as cluster:
        observed = await rollouts.observe(cluster, there, back, number=signal.SIGKILL)
        print(f"{num_workers} workers, killed: {observed}")
        cluster.assert_quiet(within_s=20.0)
    assert {each.error for each in observed.outcomes if not each.ok} <= {"worker_lost"}
    assert sum(observed.failures.values()) <= 2 * rollouts.NUM_CLIENTS
    assert max(observed.waits_s) <= LEASE_S
