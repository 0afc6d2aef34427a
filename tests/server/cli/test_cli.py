from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from server import cli
from server.cli.commands import COMMANDS


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)


def test_the_command_imports_no_torch() -> None:
    program = "import sys, server.cli; server.cli.main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("module", ["server.cli.commands", "rich.console", "importlib.metadata", "server.cli.screen"])
def test_ctrl_c_while_a_command_is_imported(module: str) -> None:
    """The signal comes as the module is about to be imported: of the command, or of what runs it."""
    program = (
        "import os, signal, sys\n"
        "def interrupt(event, of):\n"
        f"    if event == 'import' and of[0] == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.addaudithook(interrupt)\n"
        "from server.cli import main\n"
        "sys.exit(main(['serve', '--engine-url', 'http://127.0.0.1:9']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "")


def test_ctrl_c_while_a_worker_is_imported() -> None:
    """Its imports take seconds: the signal comes while they run."""
    program = "import os, signal, sys, runpy; sys.modules['worker.main'] = None\n"
    program += (
        "try: runpy.run_module('worker', run_name='__main__')\nexcept ImportError: os.kill(os.getpid(), signal.SIGINT)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--api-keys", "{file}.toml"], "--api-keys {file}.toml: No such file or directory"),
        (["--api-keys", "{file}"], "--api-keys {file}: not TOML: "),
        (["--cluster-secret-file", "{file}.secret"], "--cluster-secret-file {file}.secret: No such file or directory"),
        (["--tls-cert", "{file}", "--tls-key", "{file}"], "PEM files that fit each other are needed"),
        (["--host", "192.0.2.1"], "Cannot assign requested address"),
        (["--host", "192.0.2.1"], "Choose an address of this machine"),
        (["--chat-template", "{file}.jinja"], "--chat-template: {file}.jinja: No such file or directory"),
        (["--config", "{file}.toml"], "--config {file}.toml: No such file or directory"),
    ],
)
@pytest.mark.e2e
def test_a_gateway_names_the_option_and_the_file(options: list[str], problem: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("nothing of use")
    command = [sys.executable, "-m", "server.cli", "gateway", "--workers", "http://127.0.0.1:9", "--port", "0"]
    given = [option.format(file=file) for option in options]
    done = subprocess.run([*command, "--ops-port", "0", *given], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr, "Errno" in done.stderr) == (2, False, False)
    assert done.stdout == "", "it does not listen"
    assert problem.format(file=file) in done.stderr
    assert done.stderr.count(options[0]) <= 1


@pytest.mark.parametrize("module", ["cache.allocators.hash", "server.cli", "worker.main"])
@pytest.mark.parametrize("level", ["-O", "-OO"])
def test_imports_fail_without_assertions(module: str, level: str) -> None:
    """They keep a broken invariant from becoming wrong tokens."""
    done = subprocess.run([sys.executable, level, "-c", f"import {module}"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "unset PYTHONOPTIMIZE" in done.stderr
