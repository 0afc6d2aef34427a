"""The wheel holds the product and the benchmarks of users; all other commands name the place where they run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from worker.common.modules import module_command

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "cache", "server", "worker", "benchmarks")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
BENCHES = ["batch", "cache", "replay"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel of these sources."""
    checkout, built, folder = (tmp_path_factory.mktemp(name) for name in ("checkout", "built", "folder"))
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, checkout / name)
    subprocess.run([sys.executable, "-c", BUILD, built], cwd=checkout, capture_output=True, check=True)
    [file] = built.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder)
    return folder


def run(wheel: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*module_command(module), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    return subprocess.run(command, cwd=wheel, env=environment, capture_output=True, text=True, check=False)


def test_the_wheel_holds_the_product_and_three_benchmarks(wheel: Path) -> None:
    assert {path.name for path in wheel.iterdir() if path.suffix != ".dist-info"} == {
        *("cache", "server", "worker", "benchmarks")
    }
    package = wheel / "benchmarks"
    assert sorted(path.name for path in package.iterdir()) == sorted(
        [*("__init__.py", "__main__.py", "progress.py", "report.py", "replay_load"), *(f"{n}.py" for n in BENCHES)]
    )
    assert (package / "replay_load" / "page.html").is_file()
    for name in ("cache", "server", "worker"):
        sources = {path.relative_to(ROOT) for path in (ROOT / name).rglob("*.py")}
        assert {path.relative_to(wheel) for path in (wheel / name).rglob("*.py")} == sources


@pytest.mark.parametrize("name", BENCHES)
def test_the_benchmarks_of_users_run_from_the_wheel(wheel: Path, name: str) -> None:
    done = run(wheel, "benchmarks", name, "--help")
    assert (done.returncode, f"headstart bench {name}" in done.stdout) == (0, True), done.stderr


def test_the_other_benchmarks_name_the_checkout(wheel: Path) -> None:
    done = run(wheel, "benchmarks", "route")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "usage: headstart bench {batch,cache,replay} [--json] [--plot FILE] [OPTIONS]",
        "not installed: clone the repository and run `make bench ARGS=route` there",
    ]


def test_the_check_of_a_gpu_names_the_checkout(wheel: Path) -> None:
    done = run(wheel, "server.cli", "doctor", "--gpu")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "run `make gpu-check` there" in done.stderr


def test_the_checkout_has_every_benchmark() -> None:
    done = subprocess.run(module_command("benchmarks"), cwd=ROOT, capture_output=True, text=True, check=False)
    names = [*BENCHES, "bodies", "dashboard", "engine", "engines", "gateway", "index", "limits", "route"]
    names += ["fleet", "speculation", "steps", "tiers"]
    assert done.stderr.startswith(f"usage: headstart bench {{{','.join(sorted(names))}}} ")
