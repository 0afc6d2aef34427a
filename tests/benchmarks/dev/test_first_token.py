"""The stages of a first token, the client that times it, and the bench over real processes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.dev.first_token_load.marks import NAMES
from benchmarks.dev.first_token_load.stages import STAGES, walk


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.floats(-1.0, 3.0))))
def test_stages_and_the_rest_add_up(marks: list[tuple[str, float]]) -> None:
    """Whatever is noted, also before the request and after its first token, no time counts twice."""
    found = walk(0.0, 2.0, marks)
    assert all(spent >= 0.0 for spent in found.stages.values())
    assert sum(found.stages.values()) + found.left_s == pytest.approx(2.0)
    assert found.left_s >= -1e-9
    if {name for name, at_s in marks if 0.0 <= at_s <= 2.0} != set(NAMES):
        assert len(found.stages) < len(STAGES)


@pytest.mark.deep
def test_every_figure_comes_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.dev import first_token
    from tests.tiny_model import write_tiny_model

    write_tiny_model(tmp_path / "tiny")
    options = ["--model", str(tmp_path / "tiny"), "--rounds", "2", "--sizes", "30", "--threads", "1", "--json"]
    assert first_token.main([*options, "--num-blocks", "256"]) == 0
    said = capsys.readouterr().out
    figures = json.loads(said.splitlines()[-1])["figures"]
    assert figures.keys() >= {"warm_30_stream_here_p50_s", "cold_30_plain_here_p99_s", "warm_30_stream_step_p50_s"}
    assert all(math.isfinite(value) and value >= 0.0 for value in figures.values())
    assert all(stage in said for stage, _ in STAGES)
