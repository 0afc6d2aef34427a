"""The compiled kernels of every instruction set that this processor has."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from worker.kernels import cpu
from worker.kernels.cpu import Kernels


def builds() -> list[str]:
    """Name the -march values that can run here: AVX-512 includes AVX2."""
    capability = torch.backends.cpu.get_cpu_capability()
    names = list(cpu._MARCH)
    return [cpu._MARCH[name] for name in names[names.index(capability) :]] if capability in names else []


@pytest.fixture(params=builds(), scope="module")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """The kernels of one build, from the user's cache."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return cpu._load_or_build(request.param)


@pytest.fixture(scope="module")
def all_kernels() -> list[Kernels]:
    """The kernels of every build."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return [cpu._load_or_build(march) for march in builds()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "headstart"
