"""Readers of pipelines: Headstart's ports over a transport in memory, h11, and Node's."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import h11
import uvicorn

from server.http.protocol import HttpLimits
from server.http.server import GatewayListener
from tests.server.http.pipelines import Read
from tests.waiting import until
from worker.common.connection_limit import ConnectionLimit
from worker.common.listener import Listener
from worker.config import parse
from worker.main import Worker

LIMITS: Final = HttpLimits(60.0, 60.0, 100, 1.0, 60.0)
NUM_QUIET_TURNS: Final = 6
"""Turns of the loop without a write, after which all that was sent is answered."""


class Recorder:
    """An app that answers each request with its number, after it has read the body."""

    def __init__(self) -> None:
        self.read: list[Read] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        self.read.append(Read(scope["method"], (scope["raw_path"] + query).decode(), body))
        number = b"%d" % len(self.read)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
        await send({"type": "http.response.body", "body": number[-1:]})


class MemoryTransport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_closed = self.is_paused = self.has_ended = False

    def write(self, data: Any) -> None:
        assert not self.is_closed, "written behind the end"
        assert not self.has_ended, "written behind the end"
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_ended = True

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


class OurPort:
    """One port as production makes it, but for its app."""

    def __init__(self, name: str) -> None:
        self._app = Recorder()
        if name in ("public", "ops"):
            with socket.create_server(("127.0.0.1", 0)) as sock:
                listener = GatewayListener(self._app, sock, LIMITS)
            self._connection: Callable[[], Any] = listener.connection
        else:
            options = {"worker": ["--model", "m"], "adapter": ["--engine", "vllm", "--engine-url", "http://h"]}
            worker = Worker(parse([*options[name], "--port", "0"]))
            config: uvicorn.Config = worker._uvicorn_config("http://h")
            config.loaded_app = self._app  # type: ignore[assignment]
            self._connection = Listener(config, ConnectionLimit(10), 10.0).connection

    async def read(self, pieces: list[bytes]) -> tuple[list[Read], list[int], bool]:
        """Return the requests that the app has read, the statuses of the answers, and whether the connection ended."""
        self._app.read = []
        connection, transport = self._connection(), MemoryTransport()
        transport.set_protocol(connection)
        connection.connection_made(transport)
        for number, piece in enumerate(pieces):
            if transport.is_paused:
                await until(lambda: not transport.is_paused)
            if transport.is_closed or transport.has_ended:
                break
            connection.data_received(piece)
            if not number % 8:
                await asyncio.sleep(0)
        num_quiet, before = 0, -1
        while num_quiet < NUM_QUIET_TURNS:
            num_quiet = num_quiet + 1 if len(transport.written) == before else 0
            before = len(transport.written)
            await asyncio.sleep(0)
        statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 ([2-5]\d\d) ", transport.written)]
        has_ended = transport.is_closed or transport.has_ended
        for refusal in re.findall(rb"HTTP/1\.1 [45].*?\r\n\r\n", transport.written, re.DOTALL):
            assert b"\r\nconnection: close\r\n" in refusal
        connection.connection_lost(None)
        return self._app.read, statuses, has_ended


def read_by_h11(data: bytes) -> list[Read]:
    """Return the whole requests that h11 reads, up to the first that it refuses or that ends the connection."""
    connection = h11.Connection(h11.SERVER)
    read: list[Read] = []
    head, body = None, b""
    connection.receive_data(data)
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError:
            return read
        if isinstance(event, h11.Request):
            head, body = event, b""
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage) and head is not None:
            read.append(Read(head.method.decode(), _path(head.target.decode()), body))
            connection.send(h11.Response(status_code=400, headers=[("content-length", "0")]))
            connection.send(h11.EndOfMessage())
            if connection.our_state is not h11.DONE:
                return read
            connection.start_next_cycle()
        else:
            return read


class NodeReader:
    """A Node process. Use as a context manager."""

    def __enter__(self) -> NodeReader:
        program = Path(__file__).with_name("second_reader.cjs")
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(["node", program], stdin=pipe, stdout=pipe)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def read(self, data: bytes) -> list[Read]:
        """Return the whole requests that Node reads."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(base64.b64encode(data) + b"\n")
        self._process.stdin.flush()
        requests = json.loads(self._process.stdout.readline())
        return [Read(method, _path(url), base64.b64decode(body)) for method, url, body in requests]


def _path(target: str) -> str:
    path = re.sub("^https?://[^/?]*", "", target, flags=re.IGNORECASE)
    return path if path == target or path.startswith("/") else f"/{path}"
