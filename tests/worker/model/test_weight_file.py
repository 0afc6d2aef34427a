"""Prepared weights in a file: made once, mapped after that, and made again when the file is not what it should be."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from worker.common.folders import UNUSED_S
from worker.model import weight_file
from worker.model.weight_file import Weights, load_prepared

TENSORS = {
    "a": torch.arange(5000, dtype=torch.float32).view(50, 100),
    "b": torch.tensor([1.5]),
    "c": torch.arange(7, dtype=torch.int64),
    "d": torch.zeros(0, 3),
    "e": torch.randn(300_000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
}


class Model:
    """Loads `TENSORS`, and counts how often it makes them."""

    def __init__(self) -> None:
        self.num_made = 0

    def load(self, weights: Weights) -> dict[str, Tensor]:
        return {name: weights(name, self._maker(name)) for name in TENSORS}

    def _maker(self, name: str) -> Callable[[], Tensor]:
        def make() -> Tensor:
            self.num_made += 1
            return TENSORS[name].clone()

        return make


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "headstart"


def prepared(key: str = "k") -> int:
    """Load, check the tensors, and return how many were made."""
    model = Model()
    loaded = load_prepared(key, model.load)
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    return model.num_made


def test_a_second_start_makes_nothing(folder: Path) -> None:
    assert [prepared(), prepared(), prepared("other"), prepared()] == [len(TENSORS), 0, len(TENSORS), 0]
    assert sorted(file.name for file in folder.iterdir() if file.suffix != ".lock") == [
        "weights-k.bin",
        "weights-other.bin",
    ]


def test_who_writes_to_a_tensor_has_pages_of_his_own(folder: Path) -> None:
    for _ in range(2):
        load_prepared("k", Model().load)["a"].fill_(1.0)
    assert prepared() == 0


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 255))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_made_again(folder: Path, where: float, change: int) -> None:
    prepared()
    file = folder / "weights-k.bin"
    data = bytearray(file.read_bytes())
    data[int(where * len(data))] ^= change
    file.write_bytes(data)
    prepared()  # a changed byte between the tensors counts too
    assert prepared() == 0


@pytest.mark.parametrize("content", [b"", b"x" * 5, b"x" * 5000, weight_file.MAGIC, bytes(8) + weight_file.MAGIC])
def test_a_file_of_something_else_is_made_again(folder: Path, content: bytes) -> None:
    prepared()
    (folder / "weights-k.bin").write_bytes(content)
    assert [prepared(), prepared()] == [len(TENSORS), 0]
    foreign = (folder / "weights-k.bin").read_bytes()
    (folder / "weights-j.bin").write_bytes(foreign)
    assert [prepared("j"), prepared("j")] == [len(TENSORS), 0], "another key's"
    (folder / "weights-k.bin").write_bytes(foreign[: len(foreign) // 2])
    assert [prepared(), prepared()] == [len(TENSORS), 0], "cut"


def test_starts_at_the_same_time_make_it_once(folder: Path) -> None:
    counts: list[int] = []
    threads = [threading.Thread(target=lambda: counts.append(prepared())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(counts) == [0, 0, 0, len(TENSORS)]


def test_without_a_folder_or_room_each_start_makes_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_file, "MAX_BYTES", 1000)
    assert [prepared(), prepared()] == [len(TENSORS)] * 2
    assert [file.name for file in folder.iterdir()] == ["weights-k.lock"]
    monkeypatch.setattr(weight_file, "cache_folder", lambda: None)
    assert [prepared(), prepared()] == [len(TENSORS)] * 2


def test_an_error_leaves_no_file(folder: Path) -> None:
    def fail(weights: Weights) -> None:
        weights("a", lambda: TENSORS["a"])
        raise ValueError("no such tensor")

    with pytest.raises(ValueError, match="no such tensor"):
        load_prepared("k", fail)
    assert [file.name for file in folder.iterdir()] == ["weights-k.lock"]


def test_files_without_use_are_deleted(folder: Path) -> None:
    prepared("old")
    prepared("used")
    long_ago_s = time.time() - 2 * UNUSED_S
    for name in ("old", "used"):
        os.utime(folder / f"weights-{name}.bin", (long_ago_s, long_ago_s))
    prepared("used")
    prepared("new")
    assert sorted(file.stem for file in folder.glob("*.bin")) == ["weights-new", "weights-used"]
