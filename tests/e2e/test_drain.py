"""A gateway that stops behind a balancer: it is not ready, and serves until the balancer has noticed."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import free_ports
from tests.faults.part import Gateway
from tests.server.conftest import ANSWER, bundle_of, trained_tokenizer
from tests.server.scripted_worker import ScriptedWorker, listening
from tests.server.test_app import chat
from tests.waiting import until

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("how", ["SIGTERM", "POST /drain"])
async def test_it_serves_while_balancers_notice(how: str, tmp_path: Path) -> None:
    tokenizer = trained_tokenizer()
    worker = ScriptedWorker(bundle_of(tokenizer), reply=tokenizer.encode(ANSWER).ids)
    port, ops_port = free_ports(2)
    async with listening(worker.app()) as worker.url, httpx.AsyncClient() as client:
        options = ["--workers", worker.url, "--drain-notice-s", "600", "--drain-grace-s", "5"]
        gateway = Gateway("g0", port, ops_port, tmp_path / "g0.log", options)
        gateway.start()
        try:
            await until(lambda: asyncio.to_thread(gateway.num_ready))
            if how == "SIGTERM":
                gateway.send(signal.SIGTERM)
            else:
                (await client.post(f"http://127.0.0.1:{ops_port}/drain")).raise_for_status()
            url = gateway.url

            async def is_seen() -> bool:
                return (await client.get(f"{url}/health/ready")).status_code == 503

            await until(is_seen)
            if how == "POST /drain":
                gateway.send(signal.SIGTERM)  # as the next step of an operator: it ends nothing early
            for _ in range(3):  # on connections of their own
                answer = await client.post(f"{url}/v1/chat/completions", json=chat())
                assert answer.status_code == 200
                assert answer.headers["connection"] == "close"
            gateway.send(signal.SIGINT)  # ends the notice
            await asyncio.to_thread(gateway.wait)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port)).close()
        finally:
            gateway.stop()
