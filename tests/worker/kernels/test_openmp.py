"""A kernel on the threads that torch's products run on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from worker.kernels.openmp import team_address


def test_torch_brings_the_team_along() -> None:
    assert team_address() != 0


def test_without_it_there_is_one_thread_and_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    assert team_address.__wrapped__() == 0
    assert "compiled kernels run on one thread" in caplog.text
