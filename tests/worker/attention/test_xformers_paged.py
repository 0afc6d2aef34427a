"""xformers' paged kernel, the one that runs on CUDA, held to the torch oracle: here in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the interpreter needs triton")

TOLERANCE = 2e-3  # float16 inputs and outputs of size 1


@pytest.fixture(scope="module")
def found() -> Any:
    script = Path(__file__).with_name("interpreted.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(script.parents[3])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_it_equals_the_oracle(found: Any) -> None:
    """Decodes, whole prompts, chunks behind cached pages, and all of them in one batch; blocks of 16, 32 and 64."""
    differences = found["differences"]
    assert len(differences) == 17
    assert {case: error for case, error in differences.items() if not error < TOLERANCE} == {}


def test_few_kernels_are_compiled(found: Any) -> None:
    """For 1, 2, 4 and 8 rows: the kernel takes as constants whatever the shapes of a step are."""
    assert found["compilations"] == 4
