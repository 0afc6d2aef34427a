"""The parts of a release agree with each other: version, changes, locks, workflow, chart."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

import pytest
import yaml

from tools.lock import LOCKS, REQUIREMENTS

ROOT: Final = Path(__file__).parents[2]
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION: Final = str(PROJECT["version"])
MAX_SECTION_LINES: Final = 40
_PIN: Final = re.compile(r"^([\w.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)


def test_one_version() -> None:
    chart = yaml.safe_load((ROOT / "helm" / "headstart" / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)


def test_the_changelog_has_a_short_section_of_the_version() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text()
    (section,) = re.findall(rf"^## {re.escape(VERSION)}\b.*?\n(.*?)(?=^## |\Z)", changes, re.MULTILINE | re.DOTALL)
    assert 0 < len(section.strip().splitlines()) <= MAX_SECTION_LINES


def test_the_workflow_runs_the_checks_on_each_supported_python() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    job = workflow["jobs"]["run"]
    named = {word.rpartition(" ")[2] for word in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", word)}
    assert set(job["strategy"]["matrix"]["python"]) == named
    assert any(step.get("run") == ".ci/run" for step in job["steps"])


@pytest.mark.parametrize("name", LOCKS)
def test_every_pin_of_a_lock_has_hashes(name: str) -> None:
    """Each line of a lock has hashes, each once, and the version of its source."""
    text = (REQUIREMENTS / name).read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith(("#", "    --hash"))]
    pins = {package: version for package, version, _ in _PIN.findall(text)}
    assert len(pins) == len(lines)
    for package, _, hashes in _PIN.findall(text):
        found = re.findall(r"sha256:(\w+)", hashes)
        assert len(found) == len(set(found)), package
    for source in LOCKS[name]:
        for package, version in re.findall(r"^([\w.-]+)==(\S+)", (REQUIREMENTS / source).read_text(), re.MULTILINE):
            assert pins[package.lower().replace("_", "-")].partition("+")[0] == version.partition("+")[0]


@pytest.mark.deep
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_index_has_what_the_gateway_lock_pins(machine: str, tmp_path: Path) -> None:
    """Every wheel of the gateway's image is there for the machine, with a hash of the lock."""
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in (17, 28)]
    options = ["--require-hashes", "--no-deps", "--only-binary=:all:", "--python-version=3.11", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, f"--platform=manylinux2014_{machine}", *platforms]
    command += ["-d", str(tmp_path), "-r", str(REQUIREMENTS / "gateway.lock")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_tag_releases_the_images_that_the_chart_names() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    images = workflow["jobs"]["image"]
    made = {(each["target"], each["suffix"]) for each in images["strategy"]["matrix"]["include"]}
    assert made == {("gateway", ""), ("worker", "-cpu"), ("worker", "-cuda")}
    [build] = [step["with"] for step in images["steps"] if "build-push-action" in step.get("uses", "")]
    assert (build["sbom"], build["provenance"]) == (True, "mode=max")
    for job in workflow["jobs"].values():
        assert any("attest-build-provenance" in step.get("uses", "") for step in job["steps"])
