"""Old and unusual clients: HTTP/1.0, targets in absolute form, and clients that shut their sending side."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from server.http.middleware import known_hosts
from server.http.stream import CancelOnDisconnect, client_of
from tests.server.conftest import ANSWER
from tests.server.gateway_app import gateway
from tests.server.http.test_protocol import LOOPS, run
from tests.server.http.test_tls import Port
from tests.server.scripted_worker import ScriptedWorker
from tests.server.sse_grammar import check_chat
from tests.server.test_app import chat
from tests.waiting import HANG_S, until
from worker.common.sockets import HostNames

VERSIONS = ["1.0", "1.1"]
PATHS = ["/late", "/held", "/parts", "/length"]


class Desk:
    """An app that answers on `go`.

    It sends before that: `/late` nothing, `/held` a head, `/parts` and `/length` a part of the body, too. `/broken`
    fails then, and `/now` does not wait.
    """

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.hosts: list[bytes | None] = []
        self.num_left = 0
        self.go = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        self.hosts.append(dict(scope["headers"]).get(b"host"))
        length = [(b"content-length", b"6")] if path in ("/length", "/now") else []
        start = {"type": "http.response.start", "status": 200, "headers": length}
        try:
            self.bodies.append(await Request(scope, receive).body())
            with CancelOnDisconnect(client_of(scope)):
                if path not in ("/late", "/now"):
                    await send(start)
                if path in ("/parts", "/length", "/broken"):
                    await send({"type": "http.response.body", "body": b"one", "more_body": True})
                if path != "/now":
                    await self.go.wait()
            if path == "/broken":
                raise RuntimeError("broken")
            if path in ("/late", "/now"):
                await send(start)
            rest = b"two" if path in ("/parts", "/length") else b"onetwo"
            await send({"type": "http.response.body", "body": rest})
        except ClientDisconnect:
            self.num_left += 1


def request(path: str, version: str = "1.1", *headers: str, body: bytes = b"hello") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: h", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def body_of(answer: bytes) -> bytes:
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in head:
        return body
    parts = b""
    while (size := int(body.partition(b"\r\n")[0], 16)) > 0:
        body = body.partition(b"\r\n")[2]
        parts, body = parts + body[:size], body[size + 2 :]
    return parts


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_sends_no_more_gets_its_whole_answer(loop: str, version: str, path: str) -> None:
    async def scenario() -> None:
        desk = Desk()
        async with Port(None, app=desk) as port, port.connected() as (reader, writer):
            writer.write(request(path, version))
            writer.write_eof()
            first = await reader.read(1)  # before the answer: a probe
            await until(lambda: desk.bodies, HANG_S)
            desk.go.set()
            answer = first + await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"connection: close\r\n" in answer or (version == "1.1" and path != "/late"), "it came behind the head"
        assert (b"transfer-encoding" in answer) == (version == "1.1" and path != "/length")
        assert body_of(answer) == b"onetwo"
        assert desk.num_left == 0

    run(loop, scenario())


@pytest.mark.parametrize("loop", LOOPS)
def test_all_requests_before_the_end_of_the_input_are_answered(loop: str) -> None:
    async def scenario() -> None:
        desk = Desk()
        async with Port(None, app=desk) as port:
            bodies = [b"x" * size for size in (5, 0, 300_000, 1)]
            async with port.connected() as (reader, writer):
                writer.write(b"".join(request("/late", body=body) for body in bodies) + request("/late")[:-1])
                writer.write_eof()
                await reader.read(1)
                desk.go.set()
                answers = await reader.read()
        assert answers.count(b"TTP/1.1 200 OK") == len(bodies)
        assert desk.bodies == bodies, "the last one is no whole request"

    run(loop, scenario())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves"])
async def test_a_silent_stream_finds_out_whether_its_client_is_there(
    worker: ScriptedWorker, version: str, leaves: bool
) -> None:
    release = asyncio.Event()
    worker.behave = worker.holds(release, 2)
    body = json.dumps(chat(stream=True)).encode()
    async with gateway(worker) as target:
        port = int(target.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("/v1/chat/completions", version, "Content-Type: application/json", body=body))
        async with asyncio.timeout(HANG_S):
            answer = await reader.readuntil(b"\n\n")
            if leaves:
                writer.close()
                await until(lambda: worker.num_running == 0, HANG_S)
                assert len(worker.aborted) == 1
                return
            writer.write_eof()
            answer += await reader.read(1)  # a probe
            release.set()
            answer += await reader.read()
        writer.close()
    assert (b"transfer-encoding" in answer) == (version == "1.1")
    assert check_chat(body_of(answer)) == [ANSWER]


async def test_http_1_0_keeps_a_connection_with_a_body_of_known_length() -> None:
    """The client has to ask for it."""
    desk = Desk()
    async with Port(None, app=desk) as port, port.connected() as (reader, writer):
        for _ in range(2):
            writer.write(request("/now", "1.0", "Connection: keep-alive", "Expect: 100-continue"))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK"), "HTTP/1.0 has no interim answers"
            assert b"connection: keep-alive\r\n" in head
            assert await reader.readexactly(6) == b"onetwo"
        desk.go.set()
        writer.write(request("/parts", "1.0", "Connection: keep-alive"))
        answer = await reader.read()
    assert b"connection: close\r\n" in answer
    assert b"transfer-encoding" not in answer
    assert body_of(answer) == b"onetwo"


@pytest.mark.parametrize("loop", LOOPS)
def test_a_broken_body_without_a_length_ends_with_a_reset(loop: str) -> None:
    async def scenario() -> None:
        desk = Desk()
        async with Port(None, app=desk) as port, port.connected() as (reader, writer):
            writer.write(request("/broken", "1.0"))
            await reader.readuntil(b"one")
            desk.go.set()
            with pytest.raises(ConnectionResetError):
                await reader.read()

    run(loop, scenario())


ABSOLUTE = [
    ("http://other:81/now", 200, b"other:81"),
    ("HTTPS://OTHER/now?x=1", 200, b"OTHER"),
    ("http://[::1]:8000/now", 200, b"[::1]:8000"),
    ("http://other", 200, b"other"),
    ("http://other?x=/now", 200, b"other"),
    ("http:///now", 400, None),
    ("http://user@other/now", 400, None),
    ("http://user:pw@other/now", 400, None),
    ("http://other:x/now", 400, None),
    ("http://other/now#part", 400, None),
    ("http:/now", 400, None),
    ("ftp://other/now", 400, None),
    ("other/now", 400, None),
    ("//other", 200, b"h"),
]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("target", "status", "host"), ABSOLUTE)
async def test_targets_in_absolute_form_name_the_host(target: str, status: int, host: bytes, version: str) -> None:
    desk = Desk()
    desk.go.set()
    async with Port(None, app=desk) as port:
        answer = await port.exchange(request(target, version, "Connection: close"))
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert desk.hosts == ([host] if status == 200 else [])


@pytest.mark.parametrize(("target", "header", "known"), [("localhost", "evil", True), ("evil", "localhost", False)])
async def test_ports_ask_for_the_host_of_the_target(target: str, header: str, known: bool) -> None:
    app = known_hosts(Desk(), HostNames("127.0.0.1", []), "--ops-hosts")
    async with Port(None, app=app) as port:
        for version in VERSIONS:
            head = f"GET http://{target}/now HTTP/{version}\r\nHost: {header}\r\nConnection: close\r\n\r\n"
            answer = await port.exchange(head.encode())
            assert answer.startswith(b"HTTP/1.1 %d " % (200 if known else 403)), answer
        answer = await port.exchange(f"GET http://{target}/now HTTP/1.0\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 %d " % (200 if known else 403)), answer
        answer = await port.exchange(f"GET http://{target}/now HTTP/1.1\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 400 "), "HTTP/1.1 asks for the header all the same"


async def test_a_reset_ends_a_request_at_once() -> None:
    desk = Desk()
    async with Port(None, app=desk) as port:
        client = socket.create_connection(("127.0.0.1", port.port))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.sendall(request("/late"))
        await until(lambda: desk.bodies, HANG_S)
        client.close()
        await until(lambda: desk.num_left == 1, HANG_S)


async def test_a_client_of_http_1_0_that_leaves() -> None:
    """Its request ends before the head of the answer."""
    desk = Desk()
    async with Port(None, app=desk) as port, port.connected() as (_, writer):
        writer.write(request("/late", "1.0"))
        await until(lambda: desk.bodies, HANG_S)
        writer.close()
        await until(lambda: desk.num_left == 1, HANG_S)
