"""Connecting to an engine: waiting for it, its key, its tokenizer, its events, and what is registered."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.e2e.serving import free_ports, resolves
from tests.waiting import until
from tests.worker.adapter.rig import fake_engine
from worker.adapter import connect as connect_module
from worker.adapter.api import EngineApi, EventSource
from worker.adapter.connect import connect, event_source
from worker.adapter.engine import AdapterEngine
from worker.config import WorkerConfig
from worker.contracts.metrics import WorkerMetrics


def config(url: str, **options: Any) -> WorkerConfig:
    return WorkerConfig(**{"engine": "vllm", "engine_url": url, **options})


async def connected(config: WorkerConfig, reports: list[str] | None = None) -> AdapterEngine:
    report = (reports if reports is not None else []).append
    return await connect(config, "http://w", "w", WorkerMetrics(), report)


async def test_what_is_registered(engine_folder: Path) -> None:
    async with fake_engine(
        engine_folder, "--lora", "pirate", "--lora", "lawyer", "--alias", "small", "--version", "9.9"
    ) as (_, url):
        engine = await connected(config(url, revision="r7"))
        member, bundle = engine.member, engine.bundle
        assert (member.model, member.numerics, member.prefill_order) == ("tiny", "vllm-9.9/unknown", "fifo")
        assert member.aliases == ("small",)
        paths = {"/v1/chat/completions", "/v1/completions"}
        assert set(member.capabilities) == {*paths, "adapter:lawyer", "adapter:pirate"}
        assert (bundle.revision, bundle.max_model_len, bundle.vocab_size) == ("r7", 4096, 32_000)
        await engine.close()
        renamed = await connected(config(url, served_model_name="other", max_model_len=100, events="none"))
        assert (renamed.member.model, renamed.bundle.max_model_len) == ("other", 100)
        assert "no cache events" in (renamed.index_problem or "")
        await renamed.close()


async def test_a_server_of_several_processes_and_ranks(engine_folder: Path) -> None:
    """Its gauges have no sample before the first request, which can only come through a gateway."""
    options = ("--api-server-count", "2", "--ranks", "2")
    async with fake_engine(engine_folder, *options, events=False) as (_, url):
        with pytest.raises(ValueError, match=r"--engine-rank: this server has the ranks 0, 1: start an adapter for"):
            await connected(config(url))
        with pytest.raises(OSError, match=r"--engine-rank 2: this server has the ranks 0, 1"):
            await connected(config(url, engine_rank=2))
        for rank in (0, 1):
            engine = await connected(config(url, engine_rank=rank, events="none"))
            engine.start()
            await until(lambda engine=engine: engine.load.num_blocks)
            assert (engine.not_ready_reason, engine.load.num_blocks) == (None, 512)
            await engine.close()


async def test_an_engine_takes_one_adapter(engine_folder: Path) -> None:
    """By whatever name of its address; the next one may serve it when the first has ended."""
    async with fake_engine(engine_folder) as (_, url):
        first = await connected(config(url))
        names = ["127.0.0.1", *filter(resolves, ["localhost"])]
        for same in (url.replace("127.0.0.1", name) for name in names):
            with pytest.raises(ValueError, match="another adapter on this machine serves"):
                await connected(config(same, events="none"))
        await first.close()
        await (await connected(config(f"{url}/v1/"))).close()


async def test_the_key_of_the_engine(engine_folder: Path) -> None:
    key = engine_folder / "key"
    async with fake_engine(engine_folder, "--api-key", "sk-secret") as (_, url):
        for wrong in ("", "sk-other"):
            key.write_text(wrong or "x")
            with pytest.raises(ValueError, match=r"--engine-key-file.*401"):
                await connected(config(url, engine_key_file=str(key)))
        with pytest.raises(ValueError, match=r"--engine-key-file.*401"):
            await connected(config(url))
        key.write_text("sk-secret\n")
        await (await connected(config(url, engine_key_file=str(key)))).close()


async def test_another_tokenizer_is_refused(engine_folder: Path) -> None:
    async with fake_engine(engine_folder, "--tokenizer-shift", "1") as (_, url):
        with pytest.raises(ValueError, match=r"--tokenizer: the engine's token ids differ.* position 0 "):
            await connected(config(url))


async def test_an_engine_without_events_is_refused_by_default(engine_folder: Path) -> None:
    async with fake_engine(engine_folder, events=False) as (_, url):
        with pytest.raises(ValueError, match=r"--events auto.*--kv-events-config.*--events none"):
            await connected(config(url))


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:5557", "tcp://10.0.0.1:5557", "udp://x:1", "ipc:///no/folder/x"])
async def test_an_endpoint_that_others_reach_is_refused(engine_folder: Path, endpoint: str) -> None:
    async with fake_engine(engine_folder) as (_, url):
        with pytest.raises((ValueError, OSError), match=endpoint):
            await connected(config(url, events=endpoint))


async def test_it_waits_for_the_engine(engine_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect_module, "RETRY_S", 0.001)
    [port] = free_ports(1)
    reports: list[str] = []
    connecting = asyncio.create_task(connected(config(f"http://127.0.0.1:{port}"), reports))
    await until(lambda: reports)
    await asyncio.sleep(0.05)
    assert len(reports) == 1, "said once"
    monkeypatch.setattr(connect_module, "REPEAT_S", 0.001)
    await until(lambda: len(reports) > 2)
    assert reports[0].startswith(f"waiting for the engine at http://127.0.0.1:{port}: ")
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting


async def test_past_resets_end_no_epoch_later(engine_folder: Path) -> None:
    """The engine's buffer still has its resets and blocks: they are applied before a request can come."""
    async with fake_engine(engine_folder) as (fake, url):
        for start in (100, 400):
            fake.ranks[0].reset()
            async for _ in fake.ranks[0].generate(list(range(start, start + 200)), {"max_tokens": 1}, "salt", None):
                pass
        engine = await connected(config(url))
        epoch = engine.member.epoch
        assert (await asyncio.wrap_future(engine.debug_state()))["blocks"]["held"] == 6
        engine.start()
        await until(lambda: engine.load.num_blocks)
        assert engine.member.epoch == epoch
        await engine.close()


async def test_an_unknown_tokenizer_and_authority(engine_folder: Path) -> None:
    async with fake_engine(engine_folder) as (_, url):
        with pytest.raises(ValueError, match="--tokenizer"):
            await connected(config(url, tokenizer="/no/such/folder"))
        with pytest.raises(ValueError, match=r"--engine-ca"):
            await connected(config(url, engine_ca="/no/such/file"))


async def test_a_model_with_windows_has_ends_before_its_first_blocks(engine_folder: Path) -> None:
    path = engine_folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sliding_window": 512}))
    async with fake_engine(engine_folder) as (_, url):
        engine = await connected(config(url))
        assert (engine.member.ends, engine.member.engine_block_size) == ("exact", (await engine._api.load()).block_size)
        await engine.close()


async def test_it_waits_for_the_first_token(engine_folder: Path) -> None:
    """An engine may compile for minutes, and is not ready until then."""
    async with fake_engine(engine_folder) as (fake, url):
        fake.ranks[0].stop(True)
        reports: list[str] = []
        connecting = asyncio.create_task(connected(config(url, hang_s=1.0), reports))
        await until(lambda: any("first token" in line for line in reports))
        await until(lambda: fake.ranks[0].num_running)
        assert not connecting.done()
        fake.ranks[0].stop(False)
        await (await connecting).close()


@pytest.mark.parametrize(
    ("url", "endpoint", "dialled"),
    [
        ("http://10.1.2.3:8000", "tcp://*:5557", "tcp://10.1.2.3:5557"),
        ("http://engine.other:8000", "tcp://[::]:5557", "tcp://engine.other:5557"),
        ("http://[fd00::7]:8000", "tcp://*:5557", "tcp://[fd00::7]:5557"),
        ("http://localhost:8000", "tcp://*:5557", "tcp://127.0.0.1:5557"),
        ("http://10.1.2.3:8000", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557"),
    ],
)
async def test_events_come_from_where_the_engine_is(url: str, endpoint: str, dialled: str) -> None:
    async def advertised() -> EventSource:
        return EventSource(endpoint, None)

    api = cast("EngineApi", SimpleNamespace(event_source=advertised))
    for settings in (config(url), config(url, events=endpoint)):
        source = await event_source(api, settings)
        assert source is not None
        assert source.connect_address(source.endpoint) == dialled
