"""The servers of docs/vllm_deployments.md, each with an adapter before each of its ranks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.e2e.serving import free_ports
from tests.vllm.deployments import NUM_REQUESTS, count_promises, rows, served
from tests.vllm.engines import Engine, Options
from worker.config import WorkerConfig

SERVERS = sorted({row.proof for row in rows() if row.proof.startswith("engine")})


@pytest.mark.parametrize("server", SERVERS)
async def test_no_promise_is_above_what_the_engine_finds(server: str, tmp_path: Path) -> None:
    options = [option for row in rows() if row.proof == server for option in row.options]
    certificate, private = Authority(tmp_path).issue("engine", "127.0.0.1")
    words = {"SOCKET": str(tmp_path / "s"), "KEY": "sk-1", "CERT": str(certificate), "PRIVATE": str(private)}
    events, replay = (f"tcp://*:{port}" for port in free_ports(8)[::4])
    args = [words.get(option, option) for option in options]
    engine = Engine(tmp_path, Options(events=events, replay=replay, num_blocks=64, max_model_len=1024, args=args))
    (tmp_path / "key").write_text(words["KEY"])
    url = f"unix:{words['SOCKET']}" if "SOCKET" in options else engine.url
    config = WorkerConfig(
        engine="vllm",
        engine_url=url.replace("http:", "https:") if "CERT" in options else url,
        engine_key_file=str(tmp_path / "key") if "KEY" in options else None,
        engine_ca=str(tmp_path / "ca.crt") if "CERT" in options else None,
        events_exposed=True,
    )
    try:
        engine.start()
        ranks = [0, 1] if "--data-parallel-size" in options else [None]
        for rank in ranks:
            async with served(replace(config, engine_rank=rank)) as (requests, adapter):
                promises = await count_promises(requests, adapter, NUM_REQUESTS // len(ranks))
                print(f"{server}, rank {rank}: {promises}", flush=True)
                assert promises.num_wrong == 0
                assert promises.num_hits > NUM_REQUESTS // len(ranks) // 4
                assert adapter.index_problem is None
    finally:
        await asyncio.to_thread(engine.stop)
