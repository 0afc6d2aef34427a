"""The check of a GPU host, through Triton's interpreter."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.parts import NAMES, TESTS, Part
from tools.gpu_bundle import closure

ROOT = Path(__file__).parents[2]
HOST = ("torch", "triton", "sympy", "mpmath", "networkx", "filelock", "fsspec", "jinja2", "markupsafe")
"""The packages of a host that has torch, but for typing-extensions."""


def check(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the report."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--report", str(folder), *options]
    code = subprocess.run(command, check=False, cwd=ROOT).returncode
    return code, json.loads((folder / "summary.json").read_text())


def test_its_parts_run_through_the_interpreter(tmp_path: Path) -> None:
    names = ["ready", "attention", "triton_ops", "sampling", "bench", "profile"]
    code, summary = check(tmp_path, "--quick", "--parts", ",".join(names))
    assert (code, summary["ok"], summary["mode"]) == (0, True, "interpreter"), summary
    assert [(part["name"], part["status"]) for part in summary["parts"]] == [(name, "ok") for name in names]
    bench = next(part for part in summary["parts"] if part["name"] == "bench")
    assert bench["figures"]["prefill_of_matrix_rate"] > 0
    report = (tmp_path / "summary.md").read_text()
    assert "Without a GPU" in report
    assert all(f"[{name}]({part['log']})" in report for name, part in zip(names, summary["parts"], strict=True))
    for name in ("prefill", "decode"):
        assert "CPU" in (tmp_path / f"profile-{name}.txt").read_text()
        assert (tmp_path / f"profile-{name}.json.gz").stat().st_size > 0


def test_a_part_that_fails_is_reported_and_the_next_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = (sys.executable, "-c", "raise SystemExit('no model in this folder')")
    planned = [Part("attention", "", failing, 60.0), Part("parity", "", (sys.executable, "-c", ""), 60.0)]
    monkeypatch.setattr(gpu.plan, "parts", lambda *_, **__: planned)
    assert gpu.main(["--device", "cpu", "--report", str(tmp_path), "--parts", "attention,parity"]) == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    statuses = {part["name"]: part["status"] for part in summary["parts"]}
    assert (summary["ok"], statuses) == (False, {"ready": "ok", "attention": "failed", "parity": "ok"})
    assert "no model in this folder" in (tmp_path / summary["parts"][1]["log"]).read_text()


@pytest.mark.deep
def test_all_of_it(tmp_path: Path) -> None:
    code, summary = check(tmp_path)
    assert code == 0, summary
    assert [part["name"] for part in summary["parts"]] == list(NAMES)
    assert len(TESTS) == 7


def test_the_bundle_has_a_pin_for_each_package() -> None:
    names = {pin.partition("==")[0] for pin in closure()}
    assert {"pytest", "pluggy", "numpy"} <= names
    assert "torch" not in names


@pytest.mark.deep
def test_the_bundle_runs_with_torch_alone(tmp_path: Path) -> None:
    bundle = tmp_path / "headstart-gpu.tar.xz"
    subprocess.run([sys.executable, "-m", "tools.gpu_bundle", str(bundle)], check=True, cwd=ROOT)
    assert bundle.stat().st_size < 60_000_000
    with tarfile.open(bundle) as archive:
        archive.extractall(tmp_path, filter="data")
    python = make_host(tmp_path / "host")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = str(python.parent)  # no redis-server, no git, no compiler
    options = f"--quick --device cpu --report {tmp_path / 'report'}"
    bundled = str(tmp_path / "headstart-gpu")
    make = shutil.which("make")
    assert make is not None
    command = [make, "-C", bundled, "gpu-check", f"PYTHON={python}", f"ARGS={options}"]
    subprocess.run(command, check=True, env=environment)
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert summary["ok"]
    assert len(summary["commit"]) == 40
    assert [part["name"] for part in summary["parts"]] == list(NAMES)


def make_host(folder: Path) -> Path:
    """Make an environment that sees torch, and what torch requires, of this one. Return its Python."""
    venv.create(folder / "venv")
    visible = folder / "visible"
    visible.mkdir()
    for name in (*HOST, "typing-extensions"):
        tops = {file.parts[0] for file in distribution(name).files or () if ".." not in file.parts}
        for top in tops - {"__pycache__"}:
            (visible / top).symlink_to(distribution(name).locate_file(top))
    [site] = (folder / "venv").glob("lib/python*/site-packages")
    (site / "host.pth").write_text(f"{visible}\n")
    return folder / "venv" / "bin" / "python"
