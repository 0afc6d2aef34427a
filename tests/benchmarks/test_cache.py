"""The bench at a small size: it checks for itself that what it times was found, or evicted."""

from __future__ import annotations

import json

import pytest

from benchmarks.cache import main

FIGURES = {
    "hash_ns_per_block",
    "hit_ns_per_block",
    "miss_ns_per_block",
    "hit_ns_per_block_1m",
    "commit_ns_per_block",
    "bytes_per_block",
}


def test_every_figure_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--blocks", "2000", "--large-blocks", "4000", "--prompt-tokens", "512", "--rounds", "2"]
    assert main([*sizes, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert set(figures) == FIGURES
    assert min(figures.values()) > 0
    assert figures["bytes_per_block"] <= 240


def test_a_pool_too_small_for_the_rounds_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--blocks", "100"])
    assert "--blocks" in capsys.readouterr().err
