"""The CUDA kernels: compared with the torch reference in Triton's interpreter, and compiled without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import HANG_S

pytestmark = pytest.mark.e2e

pytest.importorskip("triton", reason="the interpreter needs triton")

HERE = Path(__file__).parent
TOLERANCE = 2e-3  # float16 inputs and outputs of size 1


def output_of(script: str, **variables: str) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[2]), **variables}
    command = [sys.executable, "-W", "ignore", str(HERE / script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=5 * HANG_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found() -> Any:
    return output_of("interpreted.py", TRITON_INTERPRET="1")


def test_it_equals_the_reference(found: Any) -> None:
    """Decodes, whole prompts, chunks behind cached pages, and all of them in one batch; blocks of 16, 32 and 64."""
    differences = found["differences"]
    assert len(differences) == 23
    assert {case: error for case, error in differences.items() if not error < TOLERANCE} == {}


def test_few_kernels_are_compiled(found: Any) -> None:
    """One for each of 1, 2, 4 and 8 rows: the kernel takes the shapes of a step as constants."""
    assert found["compilations"] == 4


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """Compile to machine code for an H100, as a worker of Llama 8B launches the kernels. Triton's wheel can do it."""
    sizes = output_of("compiled.py", XFORMERS_ENABLE_TRITON="1", TRITON_CACHE_DIR=str(tmp_path))
    assert sizes.keys() == {"_draw", "_fwd_kernel_splitK", "_rotate", "_splitK_reduce", "_store"}
    assert all(size > 1000 for size in sizes.values())
