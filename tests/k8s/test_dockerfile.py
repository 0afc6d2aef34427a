"""The Dockerfile as text: linted, plain enough for older builders, and fed from hash-pinned locks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.k8s.tools import HADOLINT, ROOT, call, succeed
from tools.lock import LOCKS, REQUIREMENTS

DOCKERFILE = (ROOT / "Dockerfile").read_text()


def pins(path: Path) -> dict[str, str]:
    lines = re.findall(r"^([a-zA-Z0-9._-]+)==([^\s;\\]+)", path.read_text(), re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in lines}


def test_hadolint_finds_nothing() -> None:
    assert succeed(HADOLINT, ROOT / "Dockerfile") == ""


def test_hadolint_can_find(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python\nRUN pip install redis\n")
    assert call(HADOLINT, bad).returncode != 0


def test_only_plain_syntax() -> None:
    assert "<<" not in DOCKERFILE
    assert "--link" not in DOCKERFILE
    for instruction in ("ENTRYPOINT", "CMD"):
        for line in re.findall(rf"^\s*{instruction} (.*)$", DOCKERFILE, re.MULTILINE):
            assert line.startswith("["), "the shell form needs a shell, which would not pass SIGTERM on"


def test_stages_have_a_numeric_uid_and_a_health_check() -> None:
    """This holds for every stage that runs."""
    for target in ("worker", "gateway"):
        stage = DOCKERFILE.partition(f"FROM runtime AS {target}\n")[2].partition("\nFROM ")[0]
        assert "USER 10001:10001" in stage
        assert "HEALTHCHECK" in stage


@pytest.mark.parametrize("name", LOCKS)
def test_locks_hold_the_pinned_versions_with_hashes(name: str) -> None:
    """When this fails: python tools/lock.py"""
    lock = REQUIREMENTS / name
    locked = pins(lock)
    wanted = {package: version for source in LOCKS[name] for package, version in pins(REQUIREMENTS / source).items()}
    if name == "worker-cpu.lock":
        wanted["torch"] += "+cpu"
    if name == "worker-cuda.lock":
        assert any(package.startswith("nvidia-") for package in locked)
        locked = {package: version for package, version in locked.items() if package in wanted}
    assert locked == wanted
    entries = re.split(r"^(?=[a-zA-Z0-9])", lock.read_text(), flags=re.MULTILINE)[1:]
    assert all("--hash=sha256:" in entry for entry in entries)
    assert "://" not in lock.read_text()


def test_the_gateway_lock_holds_nothing_heavy() -> None:
    assert not {"torch", "transformers", "numpy", "xformers"} & pins(REQUIREMENTS / "gateway.lock").keys()


def test_the_build_context_holds_what_is_copied_and_no_more() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    allowed = {line.removeprefix("!").rstrip("/") for line in lines if line.startswith("!")}
    copied = set()
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE):
        copied |= {word.rstrip("/") for word in line.split()[:-1]}
    covered = {path if path in allowed else "requirements/*.lock" for path in copied}
    assert covered == allowed
