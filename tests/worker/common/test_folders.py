"""Folders of one process: none is left, and none that is in use is deleted."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from worker.common.folders import private_folder

HOLD = (
    "import sys; from pathlib import Path; from worker.common.folders import private_folder\n"
    "with private_folder(Path(sys.argv[1])) as folder:\n"
    "    (folder / 'file').touch(); print(folder, flush=True); sys.stdin.read()"
)


def test_a_folder_goes_with_what_is_in_it(tmp_path: Path) -> None:
    def start() -> None:
        with private_folder(tmp_path) as folder:
            (folder / "file").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start()
    assert not list(tmp_path.iterdir())


def test_the_next_one_deletes_those_of_killed_processes(tmp_path: Path) -> None:
    (tmp_path / "headstart-notes").mkdir()
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        killed, alive = [Path(holder.stdout.readline().strip()) for holder in holders if holder.stdout]
        holders[0].kill()
        holders[0].wait()
        assert (killed / "file").exists()
        with private_folder(tmp_path) as own:
            assert {*tmp_path.iterdir()} == {own, alive, tmp_path / "headstart-notes"}
            assert (alive / "file").exists()
    finally:
        for holder in holders:
            holder.communicate("")
    assert [path.name for path in tmp_path.iterdir()] == ["headstart-notes"]


def test_no_start_deletes_the_folder_of_another(tmp_path: Path) -> None:
    def start(_: int) -> bool:
        with private_folder(tmp_path) as folder:
            (folder / "file").touch()
            return (folder / "file").exists()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(start, range(400)))
    assert not list(tmp_path.iterdir())
