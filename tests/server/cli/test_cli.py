from __future__ import annotations

import subprocess
import sys

import pytest

from server import cli
from server.cli.serve import command


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in cli.COMMANDS)


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["servee"]) == 2
    assert "there is no command 'servee'" in capsys.readouterr().err


def test_the_command_imports_no_torch() -> None:
    program = "import sys, server.cli; server.cli.main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-workers", "0"], "--num-workers must be at least 1, got 0"),
        (["--port", "70000"], "--port must be a TCP port, got 70000"),
        (["--threads", "-1"], "--threads must be at least 1, got -1"),
    ],
)
def test_serve_refuses(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", *argv]) == 2
    assert message in capsys.readouterr().err


def test_serve_passes_options_on() -> None:
    config = command.parse(["--dtype", "bfloat16", "--worker-args", "--num-blocks 9", "--policy", "round_robin"])
    assert config.worker_args == ("--num-blocks", "9", "--dtype", "bfloat16")
    assert config.gateway_args == ("--policy", "round_robin")
