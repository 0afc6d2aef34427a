"""The wheel holds the product and the benchmarks of users; all other commands name the place where they run."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from worker.common.command_line import module_command

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "cache", "server", "worker", "benchmarks")
BUILD = "import sys; from hatchling import build; build.build_wheel(sys.argv[1])"
BENCHES = ["cache", "replay"]


def copy_sources(checkout: Path) -> None:
    checkout.mkdir(exist_ok=True)
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, checkout / name)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel of these sources."""
    checkout, built, folder = (tmp_path_factory.mktemp(name) for name in ("checkout", "built", "folder"))
    copy_sources(checkout)
    subprocess.run([sys.executable, "-c", BUILD, built], cwd=checkout, capture_output=True, check=True)
    [file] = built.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder)
    return folder


def run(wheel: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*module_command(module), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    return subprocess.run(command, cwd=wheel, env=environment, capture_output=True, text=True, check=False)


def test_the_wheel_holds_the_product_and_two_benchmarks(wheel: Path) -> None:
    assert {path.name for path in wheel.iterdir() if path.suffix != ".dist-info"} == {
        *("cache", "server", "worker", "benchmarks")
    }
    package = wheel / "benchmarks"
    assert sorted(path.name for path in package.iterdir()) == sorted(
        [
            *("__init__.py", "__main__.py", "progress.py", "py.typed", "report.py", "replay_load"),
            *(f"{n}.py" for n in BENCHES),
        ]
    )
    assert (package / "replay_load" / "page.html").is_file()
    for name in ("cache", "server", "worker"):
        assert (wheel / name / "py.typed").is_file()
        sources = {path.relative_to(ROOT) for path in (ROOT / name).rglob("*.py")}
        assert {path.relative_to(wheel) for path in (wheel / name).rglob("*.py")} == sources


@pytest.mark.parametrize("name", BENCHES)
def test_the_benchmarks_of_users_run_from_the_wheel(wheel: Path, name: str) -> None:
    done = run(wheel, "benchmarks", name, "--help")
    assert (done.returncode, f"headstart bench {name}" in done.stdout) == (0, True), done.stderr


def test_the_other_benchmarks_name_the_checkout(wheel: Path) -> None:
    done = run(wheel, "benchmarks", "route")
    assert done.returncode == 2
    assert done.stderr == (
        "headstart bench route: not installed: clone the repository and run `make bench ARGS=route` there\n"
    )


def test_the_list_of_benchmarks_is_that_of_the_files() -> None:
    done = subprocess.run(
        [*module_command("benchmarks"), "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    listed = re.findall(r"^  (\w+) +\w", done.stdout, re.MULTILINE)
    sources = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "benchmarks" / "dev").glob("*.py")]
    assert sorted(listed) == sorted(
        path.stem for path in sources if path.read_text().startswith(f'"""`headstart bench {path.stem}`')
    )


def test_the_same_sources_give_the_same_archives(tmp_path: Path) -> None:
    build = "import sys; from hatchling import build; build.build_wheel(sys.argv[1]); build.build_sdist(sys.argv[1])"
    digests = []
    for time_s in (1_000_000_000, 1_500_000_000):
        checkout, built = tmp_path / f"checkout-{time_s}", tmp_path / f"built-{time_s}"
        copy_sources(checkout)
        for path in checkout.rglob("*"):
            os.utime(path, (time_s, time_s))
        subprocess.run([sys.executable, "-c", build, built], cwd=checkout, capture_output=True, check=True)
        digests.append({file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in built.iterdir()})
    assert {Path(name).suffix for name in digests[0]} == {".whl", ".gz"}
    assert digests[0] == digests[1]


def test_a_package_of_others_with_one_of_our_names(wheel: Path) -> None:
    def keys_help() -> tuple[int, str]:
        done = run(wheel, "server.cli", "keys", "--help")
        return done.returncode, done.stderr

    assert keys_help() == (0, "")
    info, init = wheel / "cache_of_others-1.dist-info", wheel / "benchmarks" / "__init__.py"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cache-of-others\nVersion: 1\n")
    (info / "RECORD").write_text("benchmarks/__init__.py,,\ncache_of_others-1.dist-info/METADATA,,\n")
    ours = init.read_text()
    try:
        done = run(wheel, "server.cli", "doctor", "--gateway-only", "--port", "0", "--ops-port", "0")
        assert "cache-of-others has a package 'benchmarks' too: install Headstart into an environment" in done.stdout
        assert keys_help() == (0, "")
        init.write_text("# of others\n")
        code, printed = keys_help()
        assert code == 2
        assert printed.startswith(
            "headstart: another package has overwritten benchmarks/__init__.py: install Headstart"
        )
    finally:
        init.write_text(ours)
        shutil.rmtree(info)
