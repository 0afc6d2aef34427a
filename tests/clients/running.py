"""Runs programs of the environments of `make test-clients` against a running server."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Final

from tests.e2e.serving import Serve
from tests.waiting import HANG_S

ROOT: Final = Path(__file__).parent.parent.parent
INSTALLED: Final = ROOT / ".venv-clients"
OPENAI2: Final = ROOT / ".venv-clients-openai2"
LITELLM: Final = ROOT / ".venv-litellm"
PROGRAMS: Final = Path(__file__).parent / "programs"


def run(command: list[str], folder: Path | None = None, **env: str) -> str:
    """Run a program in `folder`, assert that it succeeds, and return its output."""
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "NO_PROXY": "*"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=5 * HANG_S, cwd=folder, env=os.environ | quiet | env
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


def converse(serve: Serve, *command: str, **env: str) -> dict[str, Any]:
    """Return the object that a program prints last."""
    answer: dict[str, Any] = json.loads(run([*command, f"{serve.url}/v1", serve.model()], **env).splitlines()[-1])
    return answer


def converse_python(serve: Serve, program: str, installed: Path = INSTALLED) -> dict[str, Any]:
    """`converse` with one of `programs/`, by the Python of an environment."""
    return converse(serve, str(installed / "bin/python"), str(PROGRAMS / program))
