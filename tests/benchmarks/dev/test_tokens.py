"""`headstart bench tokens` on two streams: every process is measured on every way."""

from __future__ import annotations

import json

import pytest

from benchmarks.dev import tokens


def test_every_process_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--streams", "2", "--tokens", "16", "--rounds", "1", "--apis", "chat", "messages"]
    assert tokens.main([*options, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    ways = {"engine": ("adapter", "gateway"), "engine_messages": ("adapter", "gateway"), "own": ("gateway", "loop")}
    for way, processes in ways.items():
        assert min(figures[f"{way}_{name}_hops_2"] for name in processes) > 0
        assert figures[f"{way}_tokens_per_s_2"] > 0
    assert figures["own_served_ratio_2"] > 0
