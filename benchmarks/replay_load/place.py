"""Where a target is: at a URL, or in a `headstart serve` that lives as long as it is measured."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from worker.common.command_line import module_command

READY: Final = "headstart: ready in"
START_TIMEOUT_S: Final = 180.0
STOP_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.1


class StartError(Exception):
    """`headstart serve` ended, or printed nothing, before it was ready."""


@dataclass(frozen=True, slots=True)
class Place:
    """Either `url`, or the options of a `headstart serve` to start."""

    label: str
    url: str | None = None
    serve_args: Sequence[str] = ()

    @contextlib.contextmanager
    def opened(self) -> Iterator[str]:
        """The URL while it serves. Raises StartError."""
        if self.url is not None:
            yield self.url
            return
        with tempfile.TemporaryDirectory(prefix="headstart-replay-") as folder, _served(self.serve_args, folder) as url:
            yield url


@contextlib.contextmanager
def _served(args: Sequence[str], folder: str) -> Iterator[str]:
    port, ops_port = _free_ports()
    command = [*module_command("server.cli"), "serve", "--port", str(port), "--ops-port", str(ops_port), *args]
    said = Path(folder) / "stderr"
    with said.open("wb") as stderr, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr) as process:
        try:
            _wait_ready(process, said)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(STOP_TIMEOUT_S)


def _wait_ready(process: subprocess.Popen[bytes], said: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while READY not in (text := said.read_text(errors="replace")):
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise StartError("headstart serve is not ready:\n" + "\n".join(text.splitlines()[-10:]))
        time.sleep(_POLL_S)


def _free_ports() -> tuple[int, int]:
    """Two different ports that were free just before."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]
