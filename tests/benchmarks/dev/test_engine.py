from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.dev import engine
from benchmarks.dev.random_model import RandomCheckpoint
from tests.tiny_model import write_tiny_model
from tests.worker.device_streams import LateStream
from worker.doctor import num_parameters
from worker.model.config import LoadOptions
from worker.runner import model_runner

# Names that scripts outside of the repository read.
STABLE = {
    *("floor_step_s", "decode_step_b1_s", "tokens_per_s_b8", "tokens_per_s_b32", "prefill_tokens_per_s"),
    *("ttft_cold_s", "ttft_warm_s", "transformers_decode_step_b1_s", "transformers_tokens_per_s_b8"),
    *("transformers_tokens_per_s_b32", "transformers_prefill_tokens_per_s", "transformers_ttft_cold_s"),
    *("memory_bytes_per_s", "matrix_flops_per_s", "decode_b1_of_memory_rate", "prefill_of_matrix_rate"),
}
SMALL = ["--steps", "3", "--tokens", "2", "--rounds", "1", "--chunk", "2048", "--threads", "1"]


@pytest.mark.parametrize("is_file", [True, False])
def test_every_figure_comes_out(
    is_file: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights, as on a machine with a GPU and no network, need no files; and steps overlap, as there.

    The bench checks for itself that what it times as cached is.
    """
    if is_file:
        write_tiny_model(tmp_path, max_position_embeddings=8192)
        arguments = ["--model", str(tmp_path)]
    else:
        monkeypatch.setattr(model_runner, "DeviceStream", lambda device: LateStream())
        arguments = ["--shape", "tiny"]
    threads = torch.get_num_threads()
    assert engine.main([*arguments, "--dtype", "float32", "--block-size", "32", "--json", *SMALL]) == 0
    torch.set_num_threads(threads)
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["figures"].keys() >= STABLE
    assert all(math.isfinite(value) and value > 0 for value in printed["figures"].values())
    assert (printed["env"]["dtype"], printed["env"]["block_size"]) == ("float32", 32)
    assert is_file or printed["env"]["model"] == "tiny of random weights"


def test_the_shape_that_stands_for_a_large_model_has_its_size() -> None:
    config = RandomCheckpoint("llama-8b", LoadOptions(dtype="bfloat16")).shape
    assert num_parameters(config) == pytest.approx(8.03e9, rel=1e-3)
