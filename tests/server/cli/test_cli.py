from __future__ import annotations

import subprocess
import sys

import pytest

from server import cli


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


def test_serve_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--tls-cert", "x"]) == 2
    assert "headstart serve: --tls-cert and --tls-key go together" in capsys.readouterr().err
