"""The usage log: whole lines or none, rotation, shared files, and disks that are full."""

from __future__ import annotations

import asyncio
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from server.metrics import GatewayMetrics
from server.usage import log as usage_log
from server.usage.account import Account
from server.usage.log import UsageLog
from tests.waiting import until


def account(number: int = 0) -> Account:
    return Account(tenant="one", key="k", route="chat", output_tokens=number)


def make(path: Path, *, max_bytes: int = 1 << 20, max_files: int = 100) -> UsageLog:
    return UsageLog(path, max_bytes, max_files, GatewayMetrics())


def numbers(*paths: Path) -> list[int]:
    return [json.loads(line)["output_tokens"] for path in paths for line in path.read_text().splitlines()]


def files(folder: Path, pattern: str = "*") -> list[Path]:
    return sorted(folder.glob(pattern))


def counted(log: UsageLog, outcome: str) -> float:
    return log._metrics.usage_log_lines.sum(outcome)


@contextmanager
def disk_with_room(num_bytes: int) -> Iterator[None]:
    """Files of this process cannot grow beyond this size: a write beyond it is cut short, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_lines_are_written_soon_and_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    log = make(path)
    running = asyncio.create_task(log.run())
    for number in range(3):
        log.add(account(number))
    await until(lambda: numbers(path) == [0, 1, 2])
    log.add(account(3))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await log.close()
    assert numbers(path) == [0, 1, 2, 3]
    assert counted(log, "written") == 4


async def test_a_full_file_is_renamed_and_old_ones_go(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    unrelated = tmp_path / "usage.jsonl.notes"
    unrelated.write_text("keep")
    log = make(path, max_bytes=1500, max_files=3)
    for number in range(40):
        log.add(account(number))
        await log.flush()
    full = files(tmp_path, "usage.jsonl.2*")
    assert len(full) == 3
    kept = numbers(*full, path)
    assert kept == list(range(kept[0], 40)), "in order, the oldest gone"
    assert all(file.stat().st_size <= 1500 for file in full)
    assert unrelated.read_text() == "keep"


async def test_gateways_share_a_file_and_its_rotation(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    logs = [make(path, max_bytes=4000) for _ in range(4)]
    for number in range(200):
        logs[number % 4].add(account(number))
        if number % 7 == 0:
            await asyncio.gather(*(log.flush() for log in logs))
    await asyncio.gather(*(log.close() for log in logs))
    assert sorted(numbers(*files(tmp_path))) == list(range(200))


async def test_a_full_disk_costs_no_line_once_it_has_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "usage.jsonl"
    log = make(path)
    log.add(account(0))
    assert await log.flush()
    size = path.stat().st_size
    for number in (1, 2):
        log.add(account(number))
        with disk_with_room(size + 10):
            assert not await log.flush()
        assert path.stat().st_size == size, "no part of a line stays"
    assert log._metrics.usage_log_failures.sum() == 2
    assert sum("usage log" in record.message for record in caplog.records) == 1, "a cause is logged once"
    log.add(account(3))
    assert await log.flush()
    assert numbers(path) == [0, 1, 2, 3]
    assert counted(log, "lost") == 0


async def test_lines_without_a_place_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_log, "MAX_PENDING", 5)
    path = tmp_path / "folder" / "usage.jsonl"
    path.parent.mkdir()
    log = make(path)
    path.unlink()
    path.parent.rmdir()
    for number in range(8):
        log.add(account(number))
    assert not await log.flush()
    assert counted(log, "lost") == 3
    await log.close()
    assert counted(log, "lost") == 8
    assert counted(log, "written") == 0


async def test_a_line_broken_by_a_kill_stays_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    path.write_text('{"tenant":"one","ke')
    log = make(path)
    log.add(account(1))
    await log.close()
    torn, whole = path.read_text().splitlines()
    assert torn == '{"tenant":"one","ke'
    assert json.loads(whole)["output_tokens"] == 1


async def test_a_cancelled_batch_is_still_written_once(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    log = make(path)
    log.add(account(1))
    flushing = asyncio.create_task(log.flush())
    await asyncio.sleep(0)
    flushing.cancel()
    await asyncio.gather(flushing, return_exceptions=True)
    await log.close()
    assert numbers(path) == [1]


def test_a_path_that_cannot_be_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--usage-log .*No such file"):
        make(tmp_path / "none" / "usage.jsonl")
    with pytest.raises(ValueError, match="--usage-log"):
        make(tmp_path)


async def test_a_full_disk_does_not_stop_the_start(tmp_path: Path) -> None:
    """/dev/full takes the open, and no byte."""
    path = tmp_path / "usage.jsonl"
    path.symlink_to("/dev/full")
    log = make(path)
    log.add(account(1))
    assert not await log.flush()
    os.unlink(path)
    assert await log.flush()
    assert numbers(path) == [1]
