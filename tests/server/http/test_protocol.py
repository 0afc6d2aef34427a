"""A port keeps reading while it answers, to notice disconnects; its framing is strict; its connections are bounded."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
import ssl
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect, Request

from server.http import protocol
from server.http.server import GatewayListener
from server.http.stream import CancelOnDisconnect, client_of
from tests.certificates import Authority
from tests.server.http.readers import MemoryTransport
from tests.server.http.test_tls import LIMITS, Port
from tests.waiting import HANG_S, until
from worker.common import http_protocol
from worker.common.connection_limit import ConnectionLimit
from worker.common.tls import certificate_files

MIB = 1 << 20
SIZES = [1024, 65_536, 100_000, 160_000, MIB, 16 * MIB]
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}

EACH_LOOP = pytest.mark.parametrize("loop", [pytest.param("asyncio", marks=pytest.mark.e2e), "uvloop"])
"""Gateways run on uvloop."""


def post(body: bytes, *, chunked: bool = False, path: str = "/") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
    if not chunked:
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    pieces = [body[start : start + 50_000] for start in range(0, len(body), 50_000)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks + b"0\r\n\r\n"


class Desk:
    """An app that reads a body and answers on `go`: `/now` without waiting, `/stream` with a first part at once."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.num_left = 0
        self.go = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        client, path = client_of(scope), scope["path"]
        try:
            body = await Request(scope, receive).body()
            self.sizes.append(len(body))
            with CancelOnDisconnect(client):
                await send({"type": "http.response.start", "status": 200, "headers": [(b"x-path", path.encode())]})
                if path == "/stream":
                    await send({"type": "http.response.body", "body": b"x", "more_body": True})
                if path != "/now":
                    await self.go.wait()
            await send({"type": "http.response.body", "body": b"%d" % len(body)})
        except ClientDisconnect:
            self.num_left += 1


def run(loop: str, scenario: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(scenario)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@EACH_LOOP
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_disconnect_is_noticed_after_any_request(loop: str, tls: bool, authority: Authority) -> None:
    async def scenario() -> None:
        desk = Desk()
        shown, trusted = None, None
        if tls:
            shown = certificate_files(*map(str, authority.issue("gateway", "127.0.0.1"))).context
            trusted = authority.trust()
        async with Port(shown, app=desk) as port:
            for size in SIZES:
                for chunked in (False, True):
                    for path in ("/wait", "/stream"):
                        num_read, num_left = len(desk.sizes), desk.num_left
                        await leave_after(port, trusted, post(b" " * size, chunked=chunked, path=path), desk, num_read)
                        await until(lambda n=num_left: desk.num_left == n + 1, HANG_S)
                        assert desk.sizes[-1] == size

    async def leave_after(port: Port, trusted: ssl.SSLContext | None, data: bytes, desk: Desk, num_read: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port.port, ssl=trusted)
        writer.write(data)
        await until(lambda: len(desk.sizes) > num_read, HANG_S)
        writer.close()

    run(loop, scenario())


async def test_pipelined_requests_are_answered_in_order() -> None:
    desk = Desk()
    async with Port(None, app=desk) as port:
        sizes = [0, 200_000, 1, 70_000, 5]
        async with port.connected() as (reader, writer):
            writer.write(post(b"first", path="/wait") + b"".join(post(b"x" * size) for size in sizes))
            await until(lambda: desk.sizes, HANG_S)
            desk.go.set()
            for size in [5, *sizes]:
                answer = await reader.readuntil(b"\r\n0\r\n\r\n")
                assert answer.endswith(b"\r\n%d\r\n0\r\n\r\n" % size)


@pytest.mark.parametrize("num_ahead", [0, 7], ids=["parts end with a request", "parts end within one"])
async def test_endless_pipelining_gets_due_answers_then_a_close(
    monkeypatch: pytest.MonkeyPatch, num_ahead: int
) -> None:
    """Drop what came last, and end at once, never by being idle."""
    idle: list[object] = []
    monkeypatch.setattr(http_protocol, "MAX_AHEAD_BYTES", 100_000)
    monkeypatch.setattr(protocol.GatewayProtocol, "timeout_keep_alive_handler", idle.append)
    desk, request = Desk(), post(b"x" * 50_000)
    async with Port(None, app=desk) as port:
        async with port.connected() as (reader, writer):
            writer.write(post(b"first", path="/wait") + post(b"second") + request[:num_ahead])
            await until(lambda: desk.sizes, HANG_S)
            for _ in range(100):
                writer.write(request[num_ahead:] + request[:num_ahead])
                await writer.drain()
            desk.go.set()
            data = await reader.read()
        assert not idle
        assert 2 <= data.count(b"HTTP/1.1 200 OK") < 10
        assert data.endswith(b"\r\n0\r\n\r\n"), "none is cut"


@pytest.mark.parametrize("has_body", [False, True])
async def test_100_continue_is_sent_only_if_the_body_is_awaited(has_body: bool) -> None:
    async with Port(None, app=Desk()) as port:
        request = post(b"x", path="/now").replace(b"Host", b"Expect: 100-continue\r\nConnection: close\r\nHost")
        async with port.connected() as (reader, writer):
            writer.write(request if has_body else request[:-1])
            data = b"" if has_body else await reader.readuntil(b"\r\n\r\n")
            writer.write(b"" if has_body else request[-1:])
            assert (data + await reader.read()).count(b"HTTP/1.1 100 ") == (not has_body)


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    """Answer without a look at the body."""
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


def upload_head(num_bytes: int, *fields: str) -> bytes:
    lines = ("POST / HTTP/1.1", "Host: h", f"Content-Length: {num_bytes}", *fields, "", "")
    return "\r\n".join(lines).encode()


@settings(max_examples=25, deadline=None)
@given(
    loop=st.sampled_from(sorted(LOOPS)),
    num_bytes=st.sampled_from([1, 1000, 100_000, 8 * MIB]),
    piece_bytes=st.sampled_from([997, 65_536]),
    num_first=st.integers(0, 2),
    expects=st.booleans(),
)
def test_a_refusal_during_an_upload_survives_the_rest(
    loop: str, num_bytes: int, piece_bytes: int, num_first: int, expects: bool
) -> None:
    """A client that sends all of its body before it reads gets the whole answer, and the end."""

    async def scenario() -> None:
        async with Port(None, app=refuse) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
            first = b"x" * min(num_bytes - 1, num_first * piece_bytes)
            writer.write(upload_head(num_bytes, *["Expect: 100-continue"] * expects) + first)
            async with asyncio.timeout(HANG_S):
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 401 ")
                assert b"\r\nconnection: close\r\n" in head
                left = num_bytes - len(first)
                while left:
                    piece = b"x" * min(piece_bytes, left)
                    writer.write(piece)
                    await writer.drain()  # which a reset fails
                    left -= len(piece)
                assert await reader.read() == b"no"
                writer.close()
                await until(lambda: not port.connections, HANG_S)

    run(loop, scenario())


@pytest.mark.parametrize("bound", ["LINGER_S", "MAX_LINGER_BYTES", "LINGER_SILENCE_S"])
async def test_a_refused_upload_is_not_read_for_ever(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bound ends it by itself: seconds and bytes where more comes, and silence."""
    for name in ("LINGER_S", "MAX_LINGER_BYTES", "LINGER_SILENCE_S"):
        monkeypatch.setattr(http_protocol, name, 1 << 40)
    monkeypatch.setattr(http_protocol, bound, {"MAX_LINGER_BYTES": MIB}.get(bound, 0.05))
    if bound == "LINGER_S":
        monkeypatch.setattr(http_protocol, "LINGER_SILENCE_S", 0.5)  # the seconds are compared so often
    async with Port(None, app=refuse) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(upload_head(1 << 40))
        async with asyncio.timeout(HANG_S):
            assert (await reader.read()).endswith(b"no")
            with suppress(ConnectionError):
                while bound != "LINGER_SILENCE_S" and port.connections:
                    writer.write(b"x" * 10_000)
                    await writer.drain()
            await until(lambda: not port.connections, HANG_S)
        writer.close()


async def test_the_idle_time_does_not_end_a_refused_upload() -> None:
    async with Port(None, app=refuse) as port, port.connected() as (reader, writer):
        writer.write(upload_head(5) + b"1")
        assert (await reader.read()).endswith(b"no")
        [connection] = port.connections
        assert connection.timeout_keep_alive_task is None


async def test_a_refusal_behind_its_whole_body_keeps_the_connection() -> None:
    async with Port(None, app=refuse) as port, port.connected() as (reader, writer):
        writer.write((upload_head(5) + b"12345") * 2)
        for _ in range(2):
            assert b"connection: close" not in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(2) == b"no"


BROKEN = {
    "chunk size": (b"5\r\nhello\r\nzz\r\n", 400),
    "chunk end": (b"5\r\nhello!!5\r\n", 400),
    "negative": (b"-1\r\n", 400),
    "too large": (b"fffffffffffffffff\r\n", 400),
    "trailers": (b"0\r\nno colon\r\n\r\n", 400),
}
CHUNKED = b"POST /wait HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("apart", [False, True])
async def test_broken_framing_has_a_status(name: str, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "LINGER_SILENCE_S", 0.01)
    broken, status = BROKEN[name]
    desk = Desk()
    async with Port(None, app=desk) as port:
        async with port.connected() as (reader, writer):
            writer.write(CHUNKED + b"5\r\nhello\r\n")
            if apart:
                await writer.drain()
                await asyncio.sleep(0)
            writer.write(broken)
            data = await reader.read()
        assert data.startswith(b"HTTP/1.1 %d Bad Request\r\n" % status), data
        assert data.count(b"HTTP/1.1 ") == 1
        assert json.loads(data.rpartition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
        await until(lambda: desk.num_left == 1, HANG_S)
        assert desk.sizes == [], "a part of a body is never taken for all of it"


@pytest.mark.parametrize("garbage", [b"garbage\r\n\r\n", CHUNKED + b"zz\r\n", b"GET / HTTP/2.0\r\nHost: h\r\n\r\n"])
async def test_garbage_behind_a_request_does_not_harm_it(garbage: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "LINGER_SILENCE_S", 0.01)
    desk = Desk()
    async with Port(None, app=desk) as port:
        async with port.connected() as (reader, writer):
            writer.write(post(b"first", path="/wait") + post(b"second") + garbage + post(b"never"))
            await until(lambda: desk.sizes, HANG_S)
            desk.go.set()
            data = await reader.read()
        first, second, refusal = re.findall(rb"HTTP/1.1 (\d+)", data)
        assert (first, second) == (b"200", b"200")
        assert refusal in (b"400", b"505")
        assert desk.sizes == [5, 6]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/2.0\r\nHost: h\r\n\r\n", 505),
        (b"GET / HTTP/0.9\r\n\r\n", 505),
        (b"GET / HTTP/1.2\r\nHost: h\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"GET / HTTP/3.0\r\nHost: h\r\n\r\n", 505),
        (b"GET /\r\n\r\n", 505),
        (b"POST /now HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", 400),
        (b"GET / HTTP/x\r\n\r\n", 400),
        (b"POST /now HTTP/1.0\r\nContent-Length: 5\r\n\r\nhello", 200),
        (b"POST /now HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello", 200),
    ],
)
async def test_other_versions_of_http(head: bytes, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "LINGER_SILENCE_S", 0.01)
    desk = Desk()
    async with Port(None, app=desk) as port:
        data = await port.exchange(head)
        assert data.startswith(b"HTTP/1.1 %d " % status), data
        assert len(desk.sizes) == (status == 200)
        assert b"\r\ndate: " in data
        assert b"\r\nconnection: close\r\n" in data


@settings(max_examples=25, deadline=None)
@given(
    loop=st.sampled_from(sorted(LOOPS)),
    sizes=st.lists(st.sampled_from([0, 1, 1000, 70_000, 300_000]), min_size=1, max_size=6),
    chunked=st.lists(st.booleans(), min_size=6, max_size=6),
    num_cut=st.sampled_from([0, 1, 20, 4000, 150_000]),
)
def test_disconnect_at_any_byte_of_pipelined_requests(
    loop: str, sizes: list[int], chunked: list[bool], num_cut: int
) -> None:
    async def scenario() -> None:
        desk = Desk()
        async with Port(None, app=desk) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port.port)
            rest = b"".join(post(b"x" * size, chunked=c) for size, c in zip(sizes[1:], chunked, strict=False))
            writer.write(post(b"x" * sizes[0], chunked=chunked[-1], path="/wait") + rest[: max(0, len(rest) - num_cut)])
            await until(lambda: desk.sizes, HANG_S)
            writer.close()
            await until(lambda: desk.num_left == 1, HANG_S)
            assert desk.sizes == sizes[:1], "the requests behind it are dropped"

    run(loop, scenario())


class Connection:
    def __init__(self, limit: ConnectionLimit) -> None:
        self._limit: Any = limit
        self.dropped = False
        self.admitted = self._limit.open(self, self.drop)

    def drop(self) -> None:
        self.dropped = True


def test_connection_that_waited_longest_makes_room() -> None:
    limit = ConnectionLimit(3)
    asking, idle, newer = (Connection(limit) for _ in range(3))
    limit.begin(asking)
    latest = Connection(limit)
    assert latest.admitted
    assert [connection.dropped for connection in (asking, idle, newer, latest)] == [False, True, False, False]
    limit.begin(newer)
    limit.begin(latest)
    assert not Connection(limit).admitted, "all are at work"


def test_answered_connections_are_idle_and_closed_ones_make_room() -> None:
    limit = ConnectionLimit(2)
    first, second = Connection(limit), Connection(limit)
    limit.begin(first)
    limit.begin(second)
    limit.end(second)
    third = Connection(limit)
    assert third.admitted
    assert (first.dropped, second.dropped) == (False, True)
    limit.close(first)
    fourth = Connection(limit)
    assert fourth.admitted
    assert not third.dropped, "there was room"


async def test_an_announced_end_closes_with_the_next_answer() -> None:
    async with Port(None, app=Desk()) as port, port.connected() as (reader, writer):
        writer.write(post(b"x", path="/now"))
        assert b"close" not in await reader.readuntil(b"0\r\n\r\n")
        port.server.announce_end()
        writer.write(post(b"x", path="/now"))
        assert b"connection: close" in (await reader.read()).lower()


async def test_an_idle_connection_is_closed() -> None:
    """Or before, to make room."""
    limits = replace(LIMITS, keep_alive_s=1.0, max_connections=1)
    async with Port(None, limits, app=Desk()) as port, port.connected() as (reader, writer):
        writer.write(post(b"x", path="/now"))
        await reader.readuntil(b"0\r\n\r\n")
        assert (await port.exchange(post(b"x", path="/now"))).endswith(b"0\r\n\r\n")


async def test_a_lost_connection_is_freed_at_once() -> None:
    """Its timers would keep it."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        connection = GatewayListener(Desk(), sock, LIMITS).connection()
        connection.connection_made(MemoryTransport())
        connection.data_received(b"POST / HTTP/1.1\r\nHost: h\r\n")
        connection.connection_lost(None)
    kept = weakref.ref(connection)
    del connection
    gc.collect()
    assert kept() is None
