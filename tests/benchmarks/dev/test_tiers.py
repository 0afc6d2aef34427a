"""The bench over real workers of a tiny model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.dev import tiers
from tests.tiny_model import write_tiny_model

# Names that scripts outside of the repository read.
STABLE = {
    *("ttft_cold_s", "ttft_pool_s", "ttft_disk_s", "ttft_disk_uncached_s", "ttft_peer_s", "ttft_restart_s"),
    *("pool_of_cold", "disk_of_cold", "disk_uncached_of_cold", "peer_of_cold", "restart_of_cold"),
    *("ttft_join_s", "join_of_cold"),
    *("disk_write_mb_per_s", "disk_read_mb_per_s", "disk_uncached_read_mb_per_s", "peer_read_mb_per_s"),
    *("overhead_ratio_b8", "tokens_per_s_b8", "tokens_per_s_b8_disk", "written_bytes_per_read_byte"),
}
SMALL = ["--prompt-tokens", "1024", "--rounds", "1", "--pairs", "1", "--json"]


def test_every_figure_comes_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "BATCH_ANSWER_TOKENS", 4)
    write_tiny_model(tmp_path)
    assert tiers.main(["--model", str(tmp_path), *SMALL]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert figures.keys() >= STABLE
    assert all(math.isfinite(figures[name]) and figures[name] > 0 for name in STABLE)
