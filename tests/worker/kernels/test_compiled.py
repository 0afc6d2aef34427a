"""Kernels kept on disk, and what becomes of them when the disk fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numba
import pytest

from worker.kernels.compiled import compiled, digest


def doubling() -> Callable[[int], int]:
    def double(x: int) -> int:
        return 2 * x

    return double


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))  # type: ignore[attr-defined]
    return tmp_path


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_files_cut_short_by_a_crash_are_not_needed(folder: Path, suffix: str) -> None:
    compiled("i8(i8)")(doubling())
    (file,) = folder.rglob(f"*.{suffix}")
    file.write_bytes(b"")
    assert compiled("i8(i8)")(doubling())(3) == 6


def test_a_full_disk_is_not_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile._save_data", fail)
    assert compiled("i8(i8)")(doubling())(3) == 6


def test_what_is_compiled_into_others_is_not_kept(folder: Path) -> None:
    """Whoever calls it would fail with its file."""
    assert compiled()(doubling())(3) == 6
    assert not list(folder.rglob("*.nb?"))


def test_other_code_is_kept_in_another_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("old", "old", "new"):
        monkeypatch.setattr("worker.kernels.compiled._VERSION", version)
        compiled("i8(i8)")(doubling())
    assert len(list(folder.rglob("*.nbi"))) == 2


def test_any_file_of_the_folder_counts_as_code(tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("1")
    before = digest(tmp_path)
    assert digest(tmp_path) == before
    (tmp_path / "b.py").write_text("2")
    assert digest(tmp_path) != before
