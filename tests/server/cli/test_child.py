from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import psutil
import pytest

from server.cli import child as child_module
from server.cli.child import Child
from server.cli.common import CommandError
from tests.waiting import HANG_S, until

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)


def make_child(program: str, lines: asyncio.Queue[str], *, quiet: bool = False) -> Child:
    return Child("part", [sys.executable, "-u", "-c", program], lines.put_nowait, quiet=quiet)


class Running:
    """A child that runs while this context is open: its lines, and what was reported of it."""

    def __init__(self, program: str, *, stop_s: float = 5.0, quiet: bool = False) -> None:
        self.lines: asyncio.Queue[str] = asyncio.Queue()
        self.reports: list[str] = []
        self.child = make_child(program, self.lines, quiet=quiet)
        self._stop_s = stop_s

    async def __aenter__(self) -> Running:
        self._running = asyncio.create_task(self.child.run(self.reports.append))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.child.stop(self._stop_s)
        await self._running

    def process(self) -> psutil.Process:
        assert self.child.process is not None
        return psutil.Process(self.child.process.pid)


async def test_a_child_that_dies_is_restarted_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "FIRST_DELAY_S", 0.01)
    async with Running("import time; print('up', flush=True); time.sleep(600)") as running:
        assert await running.lines.get() == "up"
        first = running.process()
        first.send_signal(signal.SIGKILL)
        assert await running.lines.get() == "up"
        assert "part died (signal SIGKILL); starting it again" in running.reports[0]
    assert not first.is_running()
    assert len(running.reports) == 1


async def test_backs_off_further_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(child_module, "MAX_DELAY_S", 0.04)
    async with Running("print('up', flush=True); raise SystemExit(3)") as running:
        for _ in range(5):
            await running.lines.get()
    waits = [report.split("again in ")[1] for report in running.reports[:4]]
    assert waits == ["0.01 s", "0.02 s", "0.04 s", "0.04 s"]


async def test_a_child_that_waits_to_start_again_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "FIRST_DELAY_S", 0.2)
    async with Running("print('up', flush=True); raise SystemExit(3)") as running:
        await until(lambda: bool(running.reports))
        assert await running.lines.get() == "up"
    assert running.lines.empty()


async def test_a_child_that_is_stopped_while_it_starts_ends() -> None:
    child = make_child("import time; time.sleep(600)", asyncio.Queue())
    running = asyncio.create_task(child.run(print))
    await asyncio.sleep(0)
    assert child.process is None, "the system is starting it"
    await child.stop(5.0)
    await asyncio.wait_for(running, HANG_S)
    assert child.process is not None
    assert child.process.returncode == -signal.SIGKILL


async def test_a_child_that_ignores_sigterm_is_killed() -> None:
    async with Running(STUBBORN, stop_s=0.2) as running:
        await running.lines.get()
        process = running.process()
    assert not process.is_running(), "although it would have slept on"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_what_a_child_has_started_ends_with_it(number: signal.Signals) -> None:
    """As a compiler does, whose worker was stopped or died while it loaded."""
    program = "import subprocess; own = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL,"
    program += " stderr=subprocess.DEVNULL); print(own.pid, flush=True); own.wait()"
    lines: asyncio.Queue[str] = asyncio.Queue()
    child = make_child(program, lines)
    running = asyncio.create_task(child.run_once())
    grandchild = psutil.Process(int(await lines.get()))
    assert child.process is not None
    child.process.send_signal(number)
    assert await running == -number
    await until(lambda: not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE)


async def test_exit_code_2_is_not_retried() -> None:
    reports: list[str] = []
    child = make_child("raise SystemExit(2)", asyncio.Queue())
    with pytest.raises(CommandError, match="part cannot start"):
        await child.run(reports.append)
    assert reports == []


async def test_exit_code_2_is_a_death_once_the_child_was_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker in front of an engine that has become one that it cannot serve."""
    monkeypatch.setattr(child_module, "FIRST_DELAY_S", 0.01)
    program = (
        "import json, pathlib, sys\n"
        f"runs = pathlib.Path({str(tmp_path / 'runs')!r})\n"
        "first = not runs.exists()\n"
        "runs.touch()\n"
        "print(json.dumps({'event': 'ready'} if first else 'again'), flush=True)\n"
        "sys.exit(1 if first else 2)"
    )
    async with Running(program) as running:
        for _ in range(4):
            await running.lines.get()
    for report, code in zip(running.reports[:3], (1, 2, 2), strict=True):
        assert f"exit code {code}" in report


async def test_a_child_dies_with_its_parent() -> None:
    """The supervisor is killed by SIGKILL, and its child does not outlive it."""
    program = (
        "import asyncio, sys\n"
        "from server.cli.child import Child\n"
        "sleeper = [sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(600)']\n"
        "asyncio.run(Child('part', sleeper, lambda line: print(line, flush=True)).run(print))\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    orphan = psutil.Process(int(await parent.stdout.readline()))
    parent.kill()
    await parent.wait()
    gone, _ = psutil.wait_procs([orphan], timeout=HANG_S)
    assert gone
    transport = parent._transport  # type: ignore[attr-defined]
    transport.close()


async def test_the_last_lines_of_a_quiet_child_are_printed_at_the_end() -> None:
    lines: asyncio.Queue[str] = asyncio.Queue()
    program = "import sys; [print(i) for i in range(100)]; print('no room', file=sys.stderr); sys.exit(2)"
    with pytest.raises(CommandError):
        await make_child(program, lines, quiet=True).run(print)
    heard = [lines.get_nowait() for _ in range(lines.qsize())]
    assert (len(heard), heard[-1]) == (child_module.MAX_LAST_LINES, "no room")


async def test_a_quiet_child_that_is_stopped_prints_nothing(tmp_path: Path) -> None:
    started = tmp_path / "started"
    program = f"{STUBBORN.split('; time.sleep')[0]}; open({str(started)!r}, 'w'); time.sleep(600)"
    async with Running(program, stop_s=0.1, quiet=True) as running:
        await until(started.exists)
    assert running.lines.empty()
