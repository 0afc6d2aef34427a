"""The deployments of docs/vllm_deployments.md that the fake engine shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import free_ports
from tests.fake_engine.rank import Rank
from tests.vllm.deployments import Deployment, count_promises, rows, served
from tests.worker.adapter.rig import fake_engine
from worker.config import WorkerConfig

FAKE = [row for row in rows() if row.proof.startswith("fake ")]


def test_every_row_is_shown_by_an_engine() -> None:
    assert len(FAKE) > 5
    assert all(row.proof.startswith(("engine ", "fake ")) for row in rows())


@pytest.mark.parametrize("row", FAKE, ids=str)
async def test_a_deployment_is_exact(row: Deployment, engine_folder: Path) -> None:
    options = row.proof.split()[1:]
    ports = free_ports(8)
    ends = ["--events", f"tcp://127.0.0.1:{ports[0]}", "--replay", f"tcp://127.0.0.1:{ports[4]}"]
    async with fake_engine(engine_folder, *options, *ends, "--token-s", "0", events=False) as (fake, url):
        ranks = [rank + fake.args.first_rank for rank in range(fake.args.ranks)]
        for rank in ranks if len(ranks) > 1 else [None]:
            config = WorkerConfig(engine="vllm", engine_url=url, engine_rank=rank)
            async with served(config) as (requests, adapter):
                promises = await count_promises(requests, adapter, 80)
                assert promises.num_wrong == 0
                assert bool(promises.num_hits) == row.result.startswith("exact"), row.result


async def test_an_unreported_eviction_is_a_wrong_promise(engine_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An eviction whose news is on its way is none."""
    publish = Rank.publish

    def without_removals(rank: Rank, events: list[dict[str, Any]]) -> None:
        publish(rank, [event for event in events if event["type"] != "BlockRemoved"])

    monkeypatch.setattr(Rank, "publish", without_removals)
    ends = ["--events", f"tcp://127.0.0.1:{free_ports(1)[0]}", "--num-blocks", "160", "--token-s", "0"]
    async with (
        fake_engine(engine_folder, *ends, events=False) as (_, url),
        served(WorkerConfig(engine="vllm", engine_url=url)) as (requests, adapter),
    ):
        assert (await count_promises(requests, adapter, 80)).num_wrong
