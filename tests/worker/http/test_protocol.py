"""The adapter's HTTP server bounds what it keeps of a head."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.waiting import HANG_S
from tests.worker.http.slow_runner import SlowRunner
from tests.worker.live_worker import LiveWorker, serve
from tests.worker.scheduler.engine import generate
from worker.common.connection_limit import ConnectionLimit
from worker.common.http_protocol import MAX_HEAD_BYTES, StrictProtocol
from worker.common.listener import Listener
from worker.common.sockets import listen
from worker.http import app


async def _length(request: Request) -> Response:
    return Response(str(len(await request.body())))


@pytest.fixture
async def port() -> AsyncIterator[int]:
    app = Starlette(routes=[Route("/length", endpoint=_length, methods=["POST"])])
    config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None)
    config.load()
    server = Listener(config, ConnectionLimit(1000), 10.0)
    sock = listen("127.0.0.1", 0)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    yield sock.getsockname()[1]
    server.should_exit = True
    await serving


async def _ask(port: int, *parts: bytes) -> bytes:
    """Send the parts, and return what comes up to the end of the connection; b"" if nothing does."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(HANG_S):
            for part in parts:
                writer.write(part)
                await writer.drain()
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


HEAD = b"POST /length HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"


async def test_bodies_may_be_large(port: int) -> None:
    body = b"x" * (40 * MAX_HEAD_BYTES)
    assert (await _ask(port, HEAD + b"content-length: %d\r\n\r\n" % len(body), body)).endswith(b"%d" % len(body))


@pytest.mark.parametrize("start", [HEAD + b"a: ", b"POST /", HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\nt: "])
async def test_a_head_or_trailer_without_end_is_cut_off(port: int, start: bytes) -> None:
    answer = await _ask(port, start, *[b"x" * MAX_HEAD_BYTES] * 100)
    assert b" 200 " not in answer


async def test_an_answer_of_one_token_takes_two_writes(
    worker: LiveWorker, runner: SlowRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head leaves with Started, and the last frame with the end of the body. Each write wakes the gateway."""
    writes: list[bytes] = []

    class NotedTransport:
        def __init__(self, transport: Any) -> None:
            self._transport = transport

        def write(self, data: bytes) -> None:
            writes.append(data)
            self._transport.write(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._transport, name)

    class NotedProtocol(StrictProtocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(NotedTransport(transport))  # type: ignore[arg-type]

    monkeypatch.setattr(app, "HEAD_WAIT_S", HANG_S)
    runner.free_running.set()
    async with serve(worker.service, http=NotedProtocol) as url:
        status, answer = await dataclasses.replace(worker, url=url).generate(generate(range(10), 1))
    assert (status, len(answer.tokens[0])) == (200, 1)
    assert len(writes) <= 2
    head, _, body = writes[0].partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert body
    assert writes[-1].endswith(b"\r\n0\r\n\r\n")
