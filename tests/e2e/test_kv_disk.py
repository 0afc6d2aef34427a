"""`headstart serve` with blocks on disk: each worker has a folder, and the next start finds what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.serving import SMALL_POOL, Serve, chat
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e

_FOUND = re.compile(r"holds (\d+) blocks of an earlier process")


def num_found(serve: Serve) -> int:
    return sum(int(match[1]) for line in serve.lines if (match := _FOUND.search(line)))


def test_a_restart_finds_the_blocks(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    options = ["--model", str(tiny_model), "--worker-args", f"{SMALL_POOL} --kv-disk {folder} --kv-disk-size 64M"]
    secret = {"HEADSTART_CLUSTER_SECRET": "0" * 64}
    with Serve(*options, env=secret) as serve:
        assert num_found(serve) == 0
        chat(serve, [{"role": "user", "content": "a prompt of several blocks " * 20}], model=serve.model())
        wait_until(lambda: any(file.stat().st_size for file in folder.glob("*/*.blocks")), what="blocks on disk")
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {"0": 0o700, "1": 0o700}
    with Serve(*options, env=secret) as serve:
        assert num_found(serve) > 4
