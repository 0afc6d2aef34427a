"""Nothing runs without assertions: they keep a broken invariant from becoming wrong tokens."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["cache.allocators.hash", "server.cli", "worker.main"])
@pytest.mark.parametrize("level", ["-O", "-OO"])
def test_imports_fail_without_assertions(module: str, level: str) -> None:
    done = subprocess.run([sys.executable, level, "-c", f"import {module}"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "unset PYTHONOPTIMIZE" in done.stderr
