"""`headstart bench speculation` on a tiny model and a recording of two answers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.dev import speculation
from benchmarks.dev.simulation.traces import TOOL_CHAT
from tests.tiny_model import write_tiny_model


def test_every_kind_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "tiny-llama")
    answers = [json.dumps([{"seat": number, "kind": kind} for number in range(15)]) for kind in ("window", "aisle")]
    messages = [{"role": "user", "content": "Seats?"}, *({"role": "tool", "content": text} for text in answers)]
    with gzip.open(tmp_path / TOOL_CHAT, "wt") as trace:
        trace.write(json.dumps({"messages": messages}) + "\n")
    options = ["--traces", str(tmp_path), "--model", str(model), "--tokens", "8", "--pairs", "1", "--blocks", "1500"]
    assert speculation.main([*options, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    names = {f"{kind}_b{size}" for kind in ("quoting", "editing", "writing") for size in (1, 16)}
    assert set(figures) == names
    assert min(figures.values()) > 0
