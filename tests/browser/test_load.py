"""`headstart bench dashboard` runs at a small size and reports its figures."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from tests.waiting import HANG_S

pytestmark = pytest.mark.browser

pytest.importorskip("playwright.async_api", reason="make test-browser installs it")


@pytest.mark.skipif(
    shutil.which("chromium") is None and shutil.which("google-chrome") is None,
    reason="no Chromium on PATH: apt-get install chromium",
)
def test_the_bench_of_the_dashboard() -> None:
    options = ["--workers", "5", "--rate", "20", "--seconds", "2", "--json"]
    command = [sys.executable, "-m", "benchmarks", "dashboard", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=5 * HANG_S)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    assert figures["failed_requests"] == 0
    assert figures["decisions_per_s"] > 0
    assert 0 < figures["gateway_busy_quiet"] < 1
    assert figures["tab_bytes"] > figures["heap_bytes"] > 0
