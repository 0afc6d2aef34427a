"""Commands in a folder whose files have the names of our packages, and of those that we import."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from worker.common.command_line import module_command

pytestmark = pytest.mark.e2e

NAMES = ("server", "worker", "cache", "benchmarks", "json", "torch", "redis", "rich", "uvicorn", "numpy", "types")
ROOT = Path(__file__).parents[3]
MINE = "raise SystemExit('a file of the folder ran')\n"


@pytest.fixture(params=["files", "folders"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    for name in NAMES:
        if request.param == "files":
            (tmp_path / f"{name}.py").write_text(MINE)
        else:
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").write_text(MINE)
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ["worker", "--help"],
        ["gateway", "--help"],
        ["serve", "--help"],
        ["doctor", "--gateway-only", "--port", "0", "--ops-port", "0"],
        ["doctor", "--engine-url", "http://127.0.0.1:1", "--port", "0", "--ops-port", "0"],
        ["bench", "cache", "--help"],
    ],
    ids=" ".join,
)
def test_no_file_of_the_folder_runs(folder: Path, arguments: list[str]) -> None:
    headstart = str(Path(sys.prefix) / "bin" / "headstart")
    done = subprocess.run([headstart, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert "a file of the folder ran" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == (1 if "--engine-url" in arguments else 0), done.stderr


def test_a_child_looks_for_modules_where_they_are_installed(folder: Path) -> None:
    command = [*module_command("worker.adapter"), "ranks", "--help"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, "a file of the folder ran" in done.stderr) == (0, False), done.stderr


def test_every_module_that_we_start_goes_through_one_function() -> None:
    sources = [file for part in ("server", "worker", "cache", "benchmarks") for file in (ROOT / part).rglob("*.py")]
    others = [file for file in sources if re.search(r"""sys\.executable,[^\])]*["']-m["']""", file.read_text())]
    assert [file.relative_to(ROOT).as_posix() for file in others] == ["worker/common/command_line.py"]
