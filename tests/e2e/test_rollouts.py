"""Another block size is rolled out to two workers under load: no request fails. tests/faults has the long form."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import rollouts
from tests.faults.cluster import Cluster

pytestmark = pytest.mark.e2e


async def test_a_rollout_of_another_revision(tmp_path: Path, tiny_model: Path) -> None:
    topology = rollouts.topology(2, static_workers=False)
    with Cluster(tmp_path / "fleet", tiny_model, topology) as cluster:
        observed = await rollouts.observe(cluster, rollouts.args_of("block size", tiny_model, tmp_path))
    assert not observed.failures
    assert min(observed.num_serving) >= 1
