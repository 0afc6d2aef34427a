"""The number format: what is asked for is obeyed, and `auto` never takes one without units."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch

from worker.model import dtype
from worker.model.dtype import choose_dtype


@pytest.fixture(params=[True, False], ids=["units", "no units"])
def has_units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(dtype, "_cpu_has_bfloat16_units", lambda: request.param)
    return bool(request.param)


def test_auto_takes_bfloat16_where_a_processor_has_units(has_units: bool) -> None:
    assert choose_dtype("auto", "cpu") == ("bfloat16" if has_units else "float32")


def test_float32_is_the_default_of_a_cpu(has_units: bool) -> None:
    assert (choose_dtype(None, "cpu"), choose_dtype(None, "cuda:1")) == ("float32", "bfloat16")


def test_what_is_asked_for_is_obeyed_with_one_warning(has_units: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert [choose_dtype(asked, "cpu") for asked in ("float32", "auto", None)]
        assert not caplog.records
        assert choose_dtype("bfloat16", "cpu") == "bfloat16"
    assert ["dtype=auto" in record.getMessage() for record in caplog.records] == [True] * (not has_units)


def test_one_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="--dtype must be one of auto, float32, bfloat16, float16, got 'int8'"):
        choose_dtype("int8", "cpu")


@pytest.mark.parametrize(("has_bfloat16", "quickest"), [(True, "bfloat16"), (False, "float16")])
def test_auto_on_a_gpu(has_bfloat16: bool, quickest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bfloat16)
    assert choose_dtype("auto", "cuda:0") == quickest


def test_a_processor_with_avx2_alone_computes_in_float32() -> None:
    """As torch and oneDNN see one, whatever this machine has."""
    limits = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    asked = "from worker.model.dtype import choose_dtype; print(choose_dtype('auto', 'cpu'))"
    said = subprocess.run(
        [sys.executable, "-c", asked], env=os.environ | limits, check=True, capture_output=True, text=True
    )
    assert said.stdout.strip() == "float32"
