"""No process holds a small packet back: every TCP connection that it has accepted or opened has TCP_NODELAY.

With the option off, the kernel keeps a small write until the one before is acknowledged, which takes 40 ms.
`test_tenants.py` asks the ports and clients with TLS.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http.client import HTTPException
from pathlib import Path

import httpx
import pytest

from server.cli.common import fetch_json
from tests.e2e.engine_fleet import FakeEngine
from tests.e2e.serving import Serve, free_ports
from tests.faults.part import ROOT
from tests.redis_server import RedisServer, newest_redis
from tests.tcp_sockets import check_connections, established
from tests.waiting import HANG_S, wait_until
from tests.worker.kv_transfer.moving_engine import RECORD
from worker.contracts.exchange import ChainsWanted, Handover
from worker.kv_transfer.peers import PeerClient

pytestmark = pytest.mark.e2e


def port_of(url: str) -> int:
    return httpx.URL(url).port or 0


def test_connections_of_serve(tiny_model: Path, tmp_path: Path) -> None:
    """Ask a gateway and an adapter on uvloop, a worker on asyncio, and Redis over TCP."""
    with ExitStack() as stack:
        [redis_port] = free_ports(1)
        stack.enter_context(RedisServer(tmp_path, newest_redis(), "--port", str(redis_port)))
        redis = f"redis://127.0.0.1:{redis_port}"
        engine = FakeEngine("engine", tmp_path, tiny_model)
        engine.start()
        stack.callback(engine.kill)
        options = ["--model", str(tiny_model), "--num-workers", "1", "--threads", "1", "--redis", redis]
        serve = stack.enter_context(Serve(*options, "--engine-url", engine.url))
        client = stack.enter_context(httpx.Client(timeout=HANG_S))
        listed = client.get(f"{serve.ops_url}/workers").json()["workers"]
        workers = {f"worker {worker['worker_id']}": port_of(worker["url"]) for worker in listed}
        assert len(workers) == 2
        for model in {worker["model"] for worker in listed}:
            body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 2}
            wait_until(lambda b=body: client.post(f"{serve.url}/v1/completions", json=b).status_code == 200)
        accepted = {"gateway": serve.port, "ops": serve.ops_port, **workers}
        pids = [process.pid for process in serve.family() if process.name() != "redis-server"]
        check_connections(pids, accepted, {"redis": redis_port, "engine": engine.port, **workers})


def fetch_of_the_command_line(url: str) -> None:
    with suppress(OSError, ValueError):
        asyncio.run(fetch_json(url, method="POST", timeout_s=HANG_S))


def fetch_of_a_peer(url: str) -> None:
    with suppress(OSError, HTTPException):
        PeerClient(RECORD, "").ask(url, "e1", ChainsWanted("e1", "", 1), Handover, HANG_S)


@pytest.mark.parametrize("ask", [fetch_of_the_command_line, fetch_of_a_peer])
def test_a_connection_for_one_request(ask: Callable[[str], None]) -> None:
    """The connections that last as long as their request are asked while it waits for its answer."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        port = server.getsockname()[1]
        asking = threads.submit(ask, f"http://127.0.0.1:{port}")
        check_client(server, os.getpid())
        asking.result(HANG_S)


def test_connections_of_a_command(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        words = [sys.executable, "-m", "server.cli", "top", "--ops", url]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) as process:
            try:
                check_client(server, process.pid)
            finally:
                process.kill()


def check_client(server: socket.socket, pid: int) -> None:
    """Take one connection from the process, check its end, and close it without an answer."""
    server.settimeout(HANG_S)
    accepted, (_, port) = server.accept()
    with accepted:
        accepted.settimeout(HANG_S)
        assert accepted.recv(1)
        [found] = [sock for sock in established(pid) if sock.local_port == port]
        assert found.no_delay
