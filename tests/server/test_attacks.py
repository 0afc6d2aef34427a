"""Attacks known from other servers, on the public port: they are refused, and health keeps answering."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import psutil
import pytest

from server.auth.authentication import with_ops_key
from server.errors import ApiError
from server.event_loop import run_now
from server.http.protocol import MIN_BODY_BYTES, GatewayProtocol, HttpLimits
from server.schema.decoding import measure
from tests.server.auth.test_authentication import ROUTES, raw
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import ScriptedWorker
from tests.server.test_app import chat, post
from tests.waiting import HANG_S


def depth(body: bytes) -> int:
    return run_now(measure(body)).depth


HEALTH = b"GET /health/live HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
BODY = json.dumps(chat()).encode()


def head(*lines: str, host: str = "h") -> bytes:
    start = ("POST /v1/chat/completions HTTP/1.1", f"Host: {host}", "Connection: close")
    return "\r\n".join([*start, "Content-Type: application/json", *lines, "", ""]).encode()


TOO_LARGE = {
    "a header": b"GET / HTTP/1.1\r\nx: " + b"a" * 1_000_000,
    "a target": b"GET /" + b"a" * 200_000,
    "headers": b"GET / HTTP/1.1\r\n" + b"".join(b"h%d: x\r\n" % i for i in range(20_000)),
    "a trailer": head("Transfer-Encoding: chunked") + b"1\r\n{\r\n0\r\nt: " + b"a" * 200_000,
}


@pytest.mark.parametrize("name", TOO_LARGE)
async def test_endless_heads_get_a_431(worker: ScriptedWorker, name: str) -> None:
    async with gateway(worker) as target:
        status, data = await raw(target.url, TOO_LARGE[name])
    assert status == 431
    assert set(json.loads(data.rpartition(b"\r\n\r\n")[2])["error"]) == {"message", "type", "param", "code"}


async def test_valid_requests_still_pass(worker: ScriptedWorker) -> None:
    async with gateway(worker) as target:
        for host in ("h", "example.com:8000", "127.0.0.1", "[::1]:80", "a_b"):
            assert (await raw(target.url, head(f"Content-Length: {len(BODY)}", host=host) + BODY))[0] == 200
        chunked = head("Transfer-Encoding: Chunked") + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
        assert (await raw(target.url, chunked))[0] == 200


async def test_slow_heads_and_bodies_are_cut(worker: ScriptedWorker) -> None:
    async with gateway(worker, header_timeout_s=1.0, body_timeout_s=1.0) as target:
        host, _, port = target.url.removeprefix("http://").partition(":")

        async def slow(start: bytes) -> None:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(start)
            try:
                async with asyncio.timeout(HANG_S):
                    while not reader.at_eof():
                        writer.write(b"x")
                        try:
                            await asyncio.wait_for(reader.read(1), 0.1)
                        except TimeoutError:
                            continue
            except ConnectionError:
                pass
            finally:
                writer.close()

        starts = [b"", b"GET /health/live HTTP/1.1\r\nX: ", head("Content-Length: 100000")]
        attack = asyncio.gather(*(slow(start) for start in starts * 20))
        num_answered = 0
        while not attack.done():
            request = b"GET /health/live HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
            assert (await raw(target.url, request))[0] == 200  # within a second: the siege in tests/faults
            num_answered += 1
            await asyncio.sleep(0.05)
        await attack
        assert num_answered


async def test_endless_input_is_cut_and_costs_no_memory(worker: ScriptedWorker) -> None:
    async with gateway(worker, max_body_bytes=1 << 20) as target:
        host, _, port = target.url.removeprefix("http://").partition(":")
        process = psutil.Process()
        before = most = process.memory_info().rss
        for start, piece in (
            (head("Transfer-Encoding: chunked"), b"10000\r\n" + b"x" * 65536 + b"\r\n"),
            (b"GET /health/live HTTP/1.1\r\nX: ", b"x" * 65536),
            (b"GET /health/live HTTP/1.1\r\n", b"X: y\r\n" * 10_000),
        ):
            _, writer = await asyncio.open_connection(host, int(port))
            num_bytes = 0
            try:
                writer.write(start)
                async with asyncio.timeout(HANG_S):
                    while num_bytes < 200 << 20:
                        writer.write(piece)
                        await writer.drain()
                        num_bytes += len(piece)
                        most = max(most, process.memory_info().rss)  # while it comes: afterwards it is given back
            except ConnectionError:
                pass
            finally:
                writer.close()
        assert most - before < 64 << 20
        assert worker.received == []


async def test_body_in_tiny_chunks_is_refused(worker: ScriptedWorker) -> None:
    async with gateway(worker) as target:
        body = json.dumps(chat()).encode() + b" " * 3000
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
        assert (await raw(target.url, head("Transfer-Encoding: chunked") + chunks + b"0\r\n\r\n"))[0] == 200
        again = head("Transfer-Encoding: chunked") + chunks + b"0\r\n\r\n"
        status, data = await raw(target.url, again.replace(b"Connection: close", b"Connection: keep-alive") + again)
        assert data.count(b"HTTP/1.1 200") == 2, "each body is counted for itself"
        status, data = await raw(target.url, head("Transfer-Encoding: chunked") + b"1\r\n \r\n" * 5000)
        assert status == 400 or not data


@pytest.mark.parametrize(
    ("phase", "num_bytes", "read_paused", "is_closed"),
    [
        ("head", MIN_BODY_BYTES, False, True),
        ("body", MIN_BODY_BYTES - 1, False, True),
        ("body", MIN_BODY_BYTES, False, False),
        ("body", 0, True, False),
    ],
)
def test_a_body_that_keeps_coming_is_waited_for(phase: str, num_bytes: int, read_paused: bool, is_closed: bool) -> None:
    closed: list[bool] = []
    connection = GatewayProtocol.__new__(GatewayProtocol)
    connection.flow = SimpleNamespace(read_paused=read_paused)  # type: ignore[assignment]
    connection.transport = SimpleNamespace(is_closing=lambda: False, close=lambda: closed.append(True))  # type: ignore[assignment]
    connection.loop = SimpleNamespace(call_later=lambda *when: "a timer")  # type: ignore[assignment]
    connection._reader = SimpleNamespace(phase=phase)  # type: ignore[assignment]
    connection._new_body_bytes = num_bytes
    connection._limits = HttpLimits(0.0, 0.0, 0, 0.0, 0.0)
    connection._on_timeout()
    assert closed == [True] * is_closed
    assert (connection._timer is None) == is_closed
    if not is_closed:
        assert connection._new_body_bytes == 0, "and so much is wanted again"


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
@pytest.mark.parametrize("depth", [70, 900, 10_000, 100_000])
async def test_deep_json_is_a_400(worker: ScriptedWorker, opening: str, depth: int) -> None:
    closing = "".join({"[": "]", "{": "}"}.get(c, "") for c in reversed(opening))
    nested = opening * depth + "1" + closing * depth
    async with gateway(worker, max_body_bytes=32 << 20) as target:
        for name in ("unknown_field", "metadata", "messages", "chat_template_kwargs"):
            body = b'{"model":"tiny","%b":%b}' % (name.encode(), nested.encode())
            assert (await post(target.url, body))[0] == 400


def test_depth_is_that_of_brackets_outside_of_texts() -> None:
    assert depth(json.dumps({"text": '[{"' * 500 + "\\" * 33}).encode()) == 1
    assert depth(json.dumps([{"a": ["\\"]}] * 500).encode()) == 3
    assert depth(json.dumps([[[[["]"]]]]]).encode() * 100) == 5
    assert depth(json.dumps([[[["]"]]]]).encode() * 100) == 4


@pytest.mark.parametrize(
    ("key", "local", "shown", "status"),
    [
        (None, True, None, 200),
        (None, False, None, 403),
        (b"ops", True, None, 401),
        (b"ops", False, b"Bearer wrong", 401),
        (b"ops", False, b"Bearer ops", 200),
        (b"two words", False, b"Bearer two words", 200),
        (b"ops", False, [b"Bearer ops", b"Bearer ops"], 401),
    ],
)
async def test_changes_need_the_ops_key(
    key: bytes | None, local: bool, shown: bytes | list[bytes] | None, status: int
) -> None:
    async def app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        pass

    guard = with_ops_key(app, key, local=local)
    values = shown if isinstance(shown, list) else [] if shown is None else [shown]
    headers = [(b"authorization", value) for value in values]
    got = 200
    try:
        await guard({"type": "http", "method": "POST", "path": "/drain", "headers": headers}, None, None)  # type: ignore[arg-type]
    except ApiError as error:
        got = error.status
    assert got == status


@pytest.mark.parametrize("path", [path for method, path in ROUTES if method == "POST"])
async def test_body_without_a_media_type_is_refused(worker: ScriptedWorker, path: str) -> None:
    """A page of another site can send one, as a Blob, without asking first."""
    body = json.dumps(chat()).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    async with gateway(worker) as target:
        status, data = await raw(target.url, head.encode() + body)
        assert (status, b"content-type: application/json" in data) == (415, True)
        assert worker.received == []
