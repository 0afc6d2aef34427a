"""Start a private redis-server on loopback TCP, for measurements and replays."""

from __future__ import annotations

import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from server.cli.serve import find_redis_server


@contextmanager
def private_redis() -> Iterator[str]:
    """The URL of a private server, which ends with the context."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [str(find_redis_server()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        try:
            _wait_for(port)
            yield f"redis://127.0.0.1:{port}"
        finally:
            server.send_signal(signal.SIGKILL)
            server.wait()


def _wait_for(port: int) -> None:
    deadline_s = time.monotonic() + 20.0
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return
        if time.monotonic() > deadline_s:
            raise SystemExit("redis-server did not start")
        time.sleep(0.01)
