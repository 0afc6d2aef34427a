"""The adapter over the fake engine, on real sockets. `test_deployments.py` compares what is promised and found."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.waiting import until
from tests.worker.adapter.rig import OTHER_ROOT, Rig, fake_engine, make_request, running
from worker.adapter.api import EventSource
from worker.adapter.health import facts_of
from worker.adapter.vllm import VllmApi
from worker.common.capabilities import adapters_in

PROMPT = range(100, 300)
"""Six blocks of the engine's 32."""


@pytest.fixture
async def rig(engine_folder: Path, brisk: None) -> AsyncIterator[Rig]:
    async with fake_engine(engine_folder, "--lora", "pirate", "--token-s", "0") as (fake, url):
        events = fake.ranks[0].events
        assert events is not None
        async with running(await rig_over(url, EventSource(events.endpoint, events.replay, events.topic))) as rig:
            await until(lambda: rig.load.num_blocks and adapters_in(rig.engine.member.capabilities))
            yield rig
            await until(rig.is_idle)


async def rig_over(url: str, source: EventSource) -> Rig:
    api = VllmApi(url)
    await api.version()
    return Rig(api, source, facts_of(await api.load(), await api.model()))


async def test_an_adapter_shares_nothing_with_the_model(rig: Rig) -> None:
    await rig.answer(make_request(PROMPT))
    frames = await rig.answer(make_request(PROMPT, root=OTHER_ROOT, adapter="pirate"))
    assert frames[-1].num_cached_tokens == 0
    again = await rig.answer(make_request(PROMPT, root=OTHER_ROOT, adapter="pirate"))
    assert again[-1].num_cached_tokens == 192


async def test_index_problem(engine_folder: Path, brisk: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that publishes to a port without a listener."""
    async with fake_engine(engine_folder, events=False) as (_, url):
        rig = await rig_over(url, EventSource(f"ipc://{engine_folder}/nobody", None, ""))
        async with running(rig):
            assert rig.engine.index_problem is None
            await rig.answer(make_request(PROMPT))
            monkeypatch.setattr(rig.engine._subscriber, "silent_s", 0.0)
            assert "no cache event has arrived" in (rig.engine.index_problem or "")
