from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import engine
from tests.tiny_model import write_tiny_model

# Names that scripts outside of the repository read.
STABLE = {
    *("floor_step_s", "decode_step_b1_s", "tokens_per_s_b8", "tokens_per_s_b32", "prefill_tokens_per_s"),
    *("ttft_cold_s", "ttft_warm_s", "transformers_decode_step_b1_s", "transformers_tokens_per_s_b8"),
    *("transformers_tokens_per_s_b32", "transformers_prefill_tokens_per_s", "transformers_ttft_cold_s"),
}


def test_every_figure_comes_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_model(tmp_path, max_position_embeddings=8192)
    threads = torch.get_num_threads()
    small = ["--steps", "3", "--tokens", "2", "--rounds", "1", "--chunk", "2048", "--threads", "1"]
    assert engine.main(["--model", str(tmp_path), "--dtype", "float32", "--json", *small]) == 0
    torch.set_num_threads(threads)
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    figures = printed["figures"]
    assert figures.keys() >= STABLE
    assert all(math.isfinite(value) and value > 0 for value in figures.values())
    assert figures["ttft_warm_s"] < figures["ttft_cold_s"] / 2, "the cached prefix was computed again"
    assert printed["env"]["dtype"] == "float32"
