"""A connection has one open request, however many it has sent; those who do not read their answers wait, then leave."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from starlette.requests import Request

from server.http import protocol
from server.http.protocol import GatewayProtocol
from tests.server.http.test_protocol import MIB, post, run
from tests.server.http.test_tls import Port
from tests.waiting import HANG_S, until
from worker.common.http_reader import RequestHead

NUM_FLOODERS = 20
NUM_PIPELINED = 3000


class Counted:
    """An app that answers after some turns of the loop, and counts what each connection has open and has parsed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer_bytes: int = 100) -> None:
        self.num_open: Counter[Any] = Counter()
        self.most_open = self.most_parsed = self.num_admitted = 0
        self._answer = b"x" * answer_bytes
        parsed: Counter[GatewayProtocol] = Counter()
        begin, end = GatewayProtocol.on_head, GatewayProtocol.on_response_complete

        def begun(connection: GatewayProtocol, head: RequestHead) -> None:
            parsed[connection] += 1
            self.most_parsed = max(self.most_parsed, parsed[connection])
            begin(connection, head)

        def ended(connection: GatewayProtocol) -> None:
            parsed[connection] -= 1
            end(connection)

        monkeypatch.setattr(GatewayProtocol, "on_head", begun)
        monkeypatch.setattr(GatewayProtocol, "on_response_complete", ended)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        client = scope["client"]
        self.num_admitted += 1
        self.num_open[client] += 1
        self.most_open = max(self.most_open, self.num_open[client])
        await Request(scope, receive).body()
        for _ in range(3):
            await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": self._answer})
        self.num_open[client] -= 1


async def quiet(app: Counted) -> None:
    """Until nothing is admitted any more."""
    before = -1
    async with asyncio.timeout(HANG_S):
        while before != app.num_admitted:
            before = app.num_admitted
            await asyncio.sleep(0.3)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_flood_of_pipelined_requests_takes_turns_with_others(
    loop: str, chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        app = Counted(monkeypatch)
        async with Port(None, app=app) as port:
            flood = post(b'{"prompt": "\\n\\r\\n\\r\\n", "max_tokens": 1}', chunked=chunked) * NUM_PIPELINED
            writers = [(await asyncio.open_connection("127.0.0.1", port.port))[1] for _ in range(NUM_FLOODERS)]
            for writer in writers:
                writer.write(flood)
            reader, other = await asyncio.open_connection("127.0.0.1", port.port)
            await until(lambda: app.num_admitted > NUM_FLOODERS)
            num_before = app.num_admitted
            other.write(post(b"{}"))
            async with asyncio.timeout(HANG_S):
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            assert app.num_admitted - num_before < 40 * NUM_FLOODERS, "it waited for a flood"
            assert app.num_admitted < NUM_FLOODERS * NUM_PIPELINED // 2, "the flood was over: nothing was tried"
            assert (app.most_open, app.most_parsed) == (1, 1)
            for writer in (*writers, other):
                writer.transport.abort()

    run(loop, scenario())


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_unread_answers_delay_only_their_own_connection(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        app = Counted(monkeypatch, answer_bytes=MIB)
        async with Port(None, app=app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port.port, limit=1024)
            writer.write(post(b"{}") * 200)
            await quiet(app)
            assert app.num_admitted < 50, "nothing is computed for a client that does not read"
            async with asyncio.timeout(HANG_S):
                for _ in range(200):
                    await reader.readuntil(b"\r\n\r\n")
                    left = MIB + len(b"100000\r\n\r\n0\r\n\r\n")
                    await reader.readexactly(left)
            assert app.num_admitted == 200, "all are answered once it reads"
            writer.close()

    run(loop, scenario())


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_client_that_never_reads_is_dropped_in_the_end(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "WRITE_STALL_S", 0.05)
    lost: list[GatewayProtocol] = []
    lose = GatewayProtocol.connection_lost

    def noted(connection: GatewayProtocol, exc: Exception | None) -> None:
        lost.append(connection)
        lose(connection, exc)

    monkeypatch.setattr(GatewayProtocol, "connection_lost", noted)

    async def scenario() -> None:
        async with Port(None, app=Counted(monkeypatch, answer_bytes=64 * MIB)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port.port, limit=1024)
            writer.write(post(b"{}"))
            await until(lambda: lost)
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await reader.readexactly(64 * MIB)
            writer.close()

    run(loop, scenario())
