"""`headstart bench replay` as a user runs it: against a server, and with servers of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.serving import SMALL_POOL, Serve, trace_path
from tests.waiting import HANG_S

pytestmark = pytest.mark.e2e


def replay(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server.cli", "bench", "replay", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * HANG_S)


def test_a_recorded_conversation_against_a_server(smollm2: Serve, tmp_path: Path) -> None:
    page, plot = tmp_path / "report.html", tmp_path / "ttft.svg"
    trace = str(trace_path("taubench_airline_text_dev.jsonl.gz"))
    size = ("--limit", "1", "--max-turns", "3", "--max-tokens", "4")
    run = replay(trace, "--url", f"{smollm2.url}/v1", *size, "--html", str(page), "--plot", str(plot), "--json")
    assert run.returncode == 0, run.stderr
    figures = json.loads(run.stdout.splitlines()[-1])["figures"]
    label = smollm2.url.removeprefix("http://")
    assert figures[f"{label}.requests"] == 3
    assert figures[f"{label}.errors"] == 0
    # All but the last partial block of a turn's prompt is in the next one's.
    assert 0.4 < figures[f"{label}.cached_share"] < 1.0
    assert figures[f"{label}.ttft_mean_s"] > 0
    assert page.read_text().count("<svg") == 5
    assert plot.stat().st_size > 1000


def test_policies_on_servers_of_its_own(tiny_model: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (tmp_path / "chat.json").write_text(json.dumps(chat))
    serve_args = f"--serve-args=--model {tiny_model} --num-workers 1 '--worker-args={SMALL_POOL}'"
    run = replay(str(tmp_path), "--policies", "round_robin", serve_args, "--max-tokens", "4", "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1])["figures"]["round_robin.requests"] == 1


def test_what_cannot_work_is_said(tmp_path: Path) -> None:
    absent = replay(str(tmp_path / "none"), "--url", "http://127.0.0.1:1")
    assert (absent.returncode, "no such file or folder" in absent.stderr) == (2, True)
    (tmp_path / "chat.json").write_text('[{"role": "user", "content": "Hi"}]')
    refused = replay(str(tmp_path), "--url", "http://127.0.0.1:1")
    assert (refused.returncode, "--model" in refused.stderr) == (2, True)
    no_times = replay(str(tmp_path), "--url", "http://127.0.0.1:1", "--speed", "2")
    assert (no_times.returncode, "--rate" in no_times.stderr) == (2, True)
