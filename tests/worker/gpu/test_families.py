"""Every family on a GPU gives the log probabilities of `transformers` on the CPU. One case needs no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.worker.families import FAMILIES
from tests.worker.gpu.fed import TOLERANCE, largest_error
from worker.model.load import LoadOptions


def test_the_measure_itself(tmp_path: Path) -> None:
    assert largest_error(tmp_path, "llama3", 16, LoadOptions()) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_transformers(
    tmp_path: Path, device: str, family: str, block_size: int, dtype: str
) -> None:
    assert largest_error(tmp_path, family, block_size, LoadOptions(dtype=dtype, device=device)) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_second_gpu(tmp_path: Path) -> None:
    options = LoadOptions(dtype="float16", device="cuda:1")
    assert largest_error(tmp_path, "llama3", 16, options) < TOLERANCE["float16"]
