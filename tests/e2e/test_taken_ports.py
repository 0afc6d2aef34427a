"""`headstart serve` where another process has one of its ports: one line, exit code 2, and never "ready"."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.e2e.serving import Serve, free_ports
from tests.waiting import HANG_S

pytestmark = pytest.mark.e2e


class _AnswersAll(BaseHTTPRequestHandler):
    """Answers every request like a gateway with two workers."""

    def do_GET(self) -> None:
        body = b'{"status": "ready", "workers": 2}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def stranger(port: int, *, shares: bool) -> Iterator[None]:
    """Serve HTTP on this port; with `shares`, other sockets of this user may listen there too."""
    server = ThreadingHTTPServer(("127.0.0.1", port), _AnswersAll, bind_and_activate=False)
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shares)
    server.server_bind()
    server.server_activate()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def start(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "server.cli", "serve", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)


@pytest.mark.parametrize("shares", [False, True], ids=["alone", "shares"])
@pytest.mark.parametrize("num_gateways", ["1", "2"])
@pytest.mark.parametrize("taken", ["public", "ops", "second ops"])
def test_a_strangers_port_is_refused_in_one_line(taken: str, num_gateways: str, shares: bool) -> None:
    if taken == "second ops" and num_gateways == "1":
        return
    port, ops_port = free_ports(2)
    if ops_port + 1 == port:
        ops_port += 1
    theirs = {"public": port, "ops": ops_port, "second ops": ops_port + 1}[taken]
    with stranger(theirs, shares=shares):
        done = start("--port", str(port), "--ops-port", str(ops_port), "--gateways", num_gateways)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"cannot listen on 127.0.0.1:{theirs}" in line
    assert "headstart: ready" not in done.stderr


def test_another_headstart_keeps_its_port_and_may_have_any(tiny_model: Path) -> None:
    with Serve("--model", str(tiny_model), "--num-workers", "1", "--worker-args", "--num-blocks 64") as first:
        for ports in ((first.port, 0), (0, first.ops_port)):
            done = start("--port", str(ports[0]), "--ops-port", str(ports[1]))
            assert (done.returncode, "headstart: ready" in done.stderr) == (2, False), done.stderr
        first.wait_ready(1)
