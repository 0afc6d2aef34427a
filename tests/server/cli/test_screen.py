"""The output of `headstart serve` during its start."""

from __future__ import annotations

import asyncio
import errno
import io

import pytest

from server.cli import screen
from server.cli.screen import Screen
from tests.waiting import HANG_S, until


async def test_a_start_is_never_silent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a line of a part, the screen reports how far the start is, again and again."""
    monkeypatch.setattr(screen, "TICK_S", 0.01)
    monkeypatch.setattr(screen, "MAX_SILENT_S", 0.02)
    shown, printed = Screen(2), ""
    running = asyncio.create_task(shown.run())

    async def prints(text: str, times: int = 1) -> None:
        nonlocal printed

        def has_text() -> bool:
            nonlocal printed
            printed += capsys.readouterr().err
            return printed.count(text) >= times

        await until(has_text)
        printed = ""

    await prints("headstart: loading the model, 0 s so far", times=3)
    for name, layer in (("worker-0", 10), ("worker-1", 5)):
        shown.relay(name, f"headstart worker: loading layer {layer} of 30")
    await prints("headstart: loading the model, 15 of 60 layers, ")
    for name in ("worker-0", "worker-1"):
        shown.relay(name, "headstart worker: loading layer 30 of 30")
    await prints("headstart: measuring how fast the workers are, ")
    shown.relay("worker-0", "2026-11-26 INFO worker: a line of a log")
    await prints("[worker-0] 2026-11-26 INFO worker: a line of a log")
    shown.relay("worker-1", "headstart worker: ready: tiny on http://127.0.0.1:8100, cpu/float32")
    await prints("headstart: waiting until a gateway finds all workers in Redis, ", times=2)
    shown.ready()
    await asyncio.wait_for(running, HANG_S)


def test_a_full_disk_costs_lines_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sys.stderr", Full())
    Screen(1).say("a line")
