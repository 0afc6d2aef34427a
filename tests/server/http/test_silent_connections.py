"""Connections that never send anything: they count from the moment when they are accepted, with TLS and without."""

from __future__ import annotations

import asyncio
import errno
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import Authority
from tests.server.http.test_tls import LIMITS, Port, hello
from tests.waiting import HANG_S, until
from worker.common.tls import certificate_files

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
LONG = replace(LIMITS, header_timeout_s=HANG_S, keep_alive_s=HANG_S, max_connections=20)


async def ask(port: Port, authority: Authority, *, has_tls: bool) -> bytes:
    tls = authority.trust() if has_tls else None
    reader, writer = await asyncio.open_connection("127.0.0.1", port.port, ssl=tls)
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    async with asyncio.timeout(HANG_S):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize("has_tls", [False, True])
async def test_silent_connections_take_no_more_than_the_limit(has_tls: bool, tmp_path: Path) -> None:
    """The oldest of them go, and the others are answered."""
    authority = Authority(tmp_path / "ca")
    cert, key = authority.issue("gateway", "127.0.0.1")
    tls = certificate_files(str(cert), str(key)).context if has_tls else None
    async with Port(tls, LONG, app=hello) as port:
        trust = authority.trust() if has_tls else None
        reader, kept = await asyncio.open_connection("127.0.0.1", port.port, ssl=trust)
        kept.write(REQUEST)
        await reader.readuntil(b"\r\n\r\nht")
        silent = [await asyncio.open_connection("127.0.0.1", port.port) for _ in range(200)]
        assert (await ask(port, authority, has_tls=has_tls)).startswith(b"HTTP/1.1 200")
        kept.write(REQUEST)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200"), "it was idle, and not silent"
        kept.close()
        await until(lambda: num_ended(silent) >= 200 - LONG.max_connections, HANG_S)
        for _, writer in silent:
            writer.close()
        assert (await ask(port, authority, has_tls=has_tls)).startswith(b"HTTP/1.1 200")


def num_ended(connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> int:
    """How many the server has closed."""
    return sum(reader.at_eof() or reader.exception() is not None for reader, _ in connections)


class FewFiles:
    """A listening socket of a process that may open three connections."""

    def __init__(self, sock: socket.socket, port: Any) -> None:
        self._socket, self._port = sock, port

    def accept(self) -> tuple[socket.socket, Any]:
        if len(self._port.server.limit._open) >= 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return self._socket.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


async def test_without_a_free_file_the_oldest_silent_one_goes(tmp_path: Path) -> None:
    port = Port(None, replace(LONG, max_connections=1000))
    port.server._socket = FewFiles(port.listener, port)  # type: ignore[assignment]
    async with port:
        silent = [await asyncio.open_connection("127.0.0.1", port.port) for _ in range(30)]
        assert (await ask(port, Authority(tmp_path / "ca"), has_tls=False)).startswith(b"HTTP/1.1 200")
        await until(lambda: num_ended(silent) >= 27, HANG_S)
        for _, writer in silent:
            writer.close()
