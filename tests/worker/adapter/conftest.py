"""Folders for sockets and tokenizers: short names, as a socket's has at most 107 bytes."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.waiting import until
from tests.worker.adapter.rig import Rig, ScriptedApi, running, write_tokenizer
from worker.adapter import engine as engine_module


@pytest.fixture
def engine_folder() -> Iterator[Path]:
    """With a tokenizer, for `fake_engine`."""
    with tempfile.TemporaryDirectory() as name:
        yield write_tokenizer(Path(name))


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is asked for its counts every few milliseconds."""
    monkeypatch.setattr(engine_module, "WATCH_S", 0.01)


@pytest.fixture
def api() -> ScriptedApi:
    return ScriptedApi()


@pytest.fixture
async def rig(api: ScriptedApi, brisk: None) -> AsyncIterator[Rig]:
    async with running(Rig(api)) as started:
        await until(lambda: started.load.num_blocks)
        yield started
        await until(started.is_idle)
        assert not api.open_calls
