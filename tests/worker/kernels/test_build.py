"""How the kernels are compiled, cached and loaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from worker.kernels import cpu

CPU = torch.device("cpu")
MARCH = cpu._MARCH.get(torch.backends.cpu.get_cpu_capability(), "")
pytestmark = pytest.mark.skipif(not MARCH or shutil.which("g++") is None, reason="needs g++ and a CPU that is served")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """One build, which tests copy."""
    file = tmp_path_factory.mktemp("build") / "cpu.so"
    cpu.build(MARCH, file)
    return file.read_bytes()


@pytest.fixture
def num_builds(monkeypatch: pytest.MonkeyPatch, library: bytes) -> list[Path]:
    """The files that were built since: the compiler is replaced by a copy."""
    built: list[Path] = []

    def copy(march: str, file: Path) -> None:
        file.write_bytes(library)
        built.append(file)

    monkeypatch.setattr(cpu, "build", copy)
    return built


def test_a_build_is_found_again(folder: Path, num_builds: list[Path]) -> None:
    for _ in range(2):
        cpu._load_or_build(MARCH)
    assert num_builds == list(folder.iterdir())


def test_another_source_is_another_file(
    folder: Path, num_builds: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu._load_or_build(MARCH)
    changed = tmp_path / "cpu.cpp"
    changed.write_text("// changed")
    monkeypatch.setattr(cpu, "_SOURCE", changed)
    cpu._load_or_build(MARCH)
    assert len(set(num_builds)) == 2


def test_a_changed_header_is_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_SOURCE", tmp_path / "cpu.cpp")
    (tmp_path / "cpu.cpp").write_text('#include "part.h"')
    names = set()
    for text in ("int one;", "int two;"):
        (tmp_path / "part.h").write_text(text)
        names.add(cpu._file_name(MARCH, ""))
    assert len(names) == 2


def test_another_compiler_and_other_flags_are_other_files(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {cpu._file_name(MARCH, "g++ 12"), cpu._file_name(MARCH, "g++ 13")}
    monkeypatch.setattr(cpu, "_FLAGS", ("-O0",))
    assert len(names | {cpu._file_name(MARCH, "g++ 12")}) == 3


def test_a_broken_file_is_built_again(folder: Path, num_builds: list[Path]) -> None:
    version = subprocess.run(["g++", "--version"], check=True, capture_output=True, text=True).stdout
    folder.mkdir()
    broken = folder / cpu._file_name(MARCH, version)
    broken.write_bytes(b"")
    cpu._load_or_build(MARCH)
    assert num_builds == [broken]


def test_a_folder_that_others_may_write_to_is_not_used(folder: Path, num_builds: list[Path]) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    cpu._load_or_build(MARCH)
    assert not list(folder.iterdir())


def test_a_file_in_place_of_the_folder_is_no_obstacle(folder: Path, num_builds: list[Path]) -> None:
    folder.write_text("")
    cpu._load_or_build(MARCH)
    assert len(num_builds) == 1


@pytest.mark.e2e
def test_two_workers_that_start_at_once_build_one_file(folder: Path) -> None:
    code = f"from worker.kernels import cpu; cpu._FLAGS += ('-O0',); cpu._load_or_build({MARCH!r}); print('ok')"
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder.parent)}
    workers = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) for _ in range(2)
    ]
    assert [worker.communicate()[0] for worker in workers] == [b"ok\n"] * 2
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(
    ("name", "replacement", "log"),
    [("_compiler", lambda: "/nowhere/g++", "not compiled"), ("_MARCH", {}, "no compiled kernels for a CPU")],
)
def test_without_kernels_torch_serves_and_the_log_says_so_once(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    replacement: object,
    log: str,
) -> None:
    monkeypatch.setattr(cpu, name, replacement)
    monkeypatch.setattr(cpu, "_loaded", cpu.cache(cpu._loaded.__wrapped__))
    assert cpu.problem() is None
    for _ in range(2):
        assert cpu.kernels_for(torch.bfloat16, CPU, deterministic=False) is None
        assert cpu.matmul_kernels_for(torch.float32, CPU) is None
    assert caplog.text.count(log) == 1
    assert log in (cpu.problem() or "")


def test_a_build_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's own temporary files are in the folder that goes."""
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\necho "$TMPDIR" >&2\ntouch "$TMPDIR/cc.s"\nexit 1')
    compiler.chmod(0o755)
    monkeypatch.setattr(cpu, "_compiler", lambda: str(compiler))
    (tmp_path / "out").mkdir()
    with pytest.raises(OSError, match=str(tmp_path / "out")):
        cpu.build(MARCH, tmp_path / "out" / "cpu.so")
    assert not list((tmp_path / "out").iterdir())


def test_without_libgomp_of_torch_nothing_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A libgomp of its own would be a second pool of threads."""
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(OSError, match="libgomp"):
        cpu.build(MARCH, tmp_path / "cpu.so")


def test_a_ready_built_file_needs_no_compiler(
    folder: Path, library: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "cpu.cpp"
    source.write_bytes(cpu._SOURCE.read_bytes())
    monkeypatch.setattr(cpu, "_SOURCE", source)
    monkeypatch.setattr(cpu, "_compiler", lambda: "/nowhere/g++")
    (tmp_path / cpu._file_name(MARCH, "")).write_bytes(library)
    assert isinstance(cpu._loaded.__wrapped__(), cpu.Kernels)


def test_the_threads_are_those_of_torch(library: bytes, tmp_path: Path) -> None:
    file = tmp_path / "cpu.so"
    file.write_bytes(library)
    cpu.Kernels(file)
    lines = Path("/proc/self/maps").read_text().splitlines()
    loaded = {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line}
    assert {Path(path).parent for path in loaded} == {Path(torch.__file__).parent / "lib"}


@pytest.mark.parametrize(("dtype", "deterministic"), [(torch.float32, False), (torch.bfloat16, True)])
def test_other_numerics_stay_with_torch(dtype: torch.dtype, deterministic: bool) -> None:
    assert cpu.kernels_for(dtype, CPU, deterministic=deterministic) is None
