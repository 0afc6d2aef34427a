"""The worker's part of `headstart doctor`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from worker import doctor
from worker.common.checks import check_kv_disk
from worker.common.command_line import module_command
from worker.model import load
from worker.model.config import LoadOptions

pytestmark = pytest.mark.e2e

CPU = torch.device("cpu")


def test_every_check_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--device", "cpu"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["name"] for line in lines] == ["torch", "gpu", "cores", "kernels", "model", "memory"]
    assert doctor.main(["--device", "cpu", "--kv-disk", "/tmp/kv", "--kv-disk-size", "1M"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["name"] == "kv disk"


def test_installing_the_compiler_is_enough(tmp_path: Path) -> None:
    """With the compiler on the PATH the check is green; it was not before."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    (tmp_path / "bin").mkdir()
    for tool in ("as", "ld", "gcc"):
        (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))
    variables = os.environ | {"PATH": str(tmp_path / "bin"), "XDG_CACHE_HOME": str(tmp_path)}

    def found() -> tuple[str, str]:
        done = subprocess.run(
            module_command("worker.doctor"), env=variables, capture_output=True, text=True, check=True
        )
        (check,) = [line for line in map(json.loads, done.stdout.splitlines()) if line["name"] == "kernels"]
        return check["status"], check["fix"]

    status, fix = found()
    assert (status, "install g++" in fix) == ("warn", True)
    fast = tmp_path / "bin" / "g++"
    fast.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0\n')  # a quarter of the time
    fast.chmod(0o755)
    assert found() == ("ok", "")


def test_memory_of_the_default_model_for_every_worker() -> None:
    check, model = doctor.check_model("")
    assert check.status == "ok"
    assert model is not None
    _, config = model
    assert doctor.num_parameters(config) == pytest.approx(134_515_008, rel=0.01)
    assert doctor.check_memory(*model, CPU, None, 1_000_000).status == "fail"
    assert doctor.check_memory(*model, CPU, "bfloat16", 1).status in ("ok", "warn")


def test_packed_weights_are_counted_as_they_lie_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    monkeypatch.setattr(load, "load_prepared", lambda key, model: model(load.make_weight))
    monkeypatch.setattr(load, "make_weight", lambda name, make: made.append(make()) or made[-1])
    loaded = load.load_model("", LoadOptions())
    counted = doctor.weight_bytes(loaded.checkpoint, loaded.config, CPU, torch.float32)
    assert counted == pytest.approx(sum(tensor.nbytes for tensor in made), rel=0.02)
    assert doctor.weight_bytes(loaded.checkpoint, loaded.config, CPU, torch.bfloat16) > counted


@pytest.mark.parametrize(
    ("source", "status", "fix"),
    [("nowhere.gguf", "fail", "--model"), ("nobody/has-this-model", "warn", "hf download nobody/has-this-model")],
)
def test_a_model_that_is_not_here(source: str, status: str, fix: str) -> None:
    check, config = doctor.check_model(source)
    assert (check.status, fix in check.fix, config) == (status, True, None)


def test_a_folder_for_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of earlier workers count as room; nothing is made by asking."""
    folder = tmp_path / "kv"
    free = shutil.disk_usage(tmp_path).free
    assert check_kv_disk(folder, free // 2, 1).status == "ok"
    assert check_kv_disk(folder, free // 2, 4).status == "warn"
    assert not folder.exists()
    (folder / "0").mkdir(parents=True)
    with (folder / "0" / "f-0.blocks").open("wb") as file:
        file.truncate(1 << 40)
    assert check_kv_disk(folder, 1 << 40, 1).status == "ok"
    assert check_kv_disk(tmp_path / "no" / "kv", 1, 1).status == "fail"
    assert check_kv_disk(folder / "0" / "f-0.blocks", 1, 1).status == "fail"
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    assert "cannot be written to" in check_kv_disk(folder, 1, 1).found
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    folder.chmod(0o777)
    assert "belongs to another user" in check_kv_disk(folder, 1, 1).found


def test_a_device_that_torch_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--device", "gpu"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["status"], last["found"][:13], last["fix"][:8]) == ("fail", "--device gpu:", "give cpu")


def test_a_gpu_that_is_not_there() -> None:
    if not torch.cuda.is_available():
        assert doctor.check_device(torch.device("cuda")).status == "fail"
    assert doctor.check_device(CPU).found
