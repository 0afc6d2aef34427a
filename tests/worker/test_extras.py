"""A package that is not installed is named with the extra that brings it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from worker.common.checks import EXTRAS, missing_extra

ROOT = Path(__file__).parents[2]
HIDE = "import sys; sys.modules.update(dict.fromkeys(['torch', 'opentelemetry'])); "
"""Their import raises ModuleNotFoundError then."""
TRACED = "'--otlp-endpoint', 'http://127.0.0.1:1', '--port', '0'"


@pytest.mark.parametrize(
    ("program", "extra"),
    [
        ("from worker.main import main; sys.exit(main(['--port', '0']))", "worker"),
        ("from benchmarks.__main__ import main; sys.exit(main(['engine']))", "worker"),
        (
            f"from server.gateway import main; sys.exit(main([{TRACED}, '--ops-port', '0', '--workers', 'http://127.0.0.1:1']))",
            "otel",
        ),
        (f"from worker.main import main; sys.exit(main([{TRACED}]))", "otel"),
    ],
    ids=["worker", "bench", "traced gateway", "traced worker"],
)
def test_the_extra_is_named_and_a_restart_would_not_help(program: str, extra: str) -> None:
    command = [sys.executable, "-c", HIDE + program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert f"pip install 'headstart[{extra}]'" in done.stderr.splitlines()[-1]


def test_every_extra_is_one_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for module, extra in EXTRAS.items():
        names = " ".join(project["optional-dependencies"][extra]).replace("-", "_")
        assert module in names, (module, extra)


def test_a_broken_package_sends_to_the_doctor() -> None:
    assert "headstart doctor" in missing_extra(ImportError("libcublasLt.so.13: cannot open", name="torch"))
