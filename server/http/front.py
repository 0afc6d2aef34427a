"""What stands on a public port: uvicorn on a socket of this process, or processes that have one each."""

from __future__ import annotations

import ipaddress
import socket
from typing import Protocol

from server.http.server import HttpServer

_BACKLOG = 2048


class Front(Protocol):
    """Takes requests from `serve` on until `stop`, and ends when the last open one has ended or its grace is over."""

    @property
    def address(self) -> str: ...

    async def serve(self) -> None: ...

    def stop(self) -> None:
        """Take no new connections."""

    def force(self) -> None:
        """Wait for nothing any more."""


class SocketFront:
    """One server on one listening socket."""

    def __init__(self, server: HttpServer, listener: socket.socket) -> None:
        self._server = server
        self._listener = listener

    @property
    def address(self) -> str:
        return address_of(self._listener)

    async def serve(self) -> None:
        await self._server.serve([self._listener])

    def stop(self) -> None:
        self._server.should_exit = True

    def force(self) -> None:
        self._server.force_exit = True


def listen(host: str, port: int) -> socket.socket:
    """Raises OSError that says where, and what to do."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(
            f"cannot listen on {host}:{port}: {reason}. Choose other ports with --port and --ops-port; "
            "`headstart doctor` tells which are free"
        ) from error
    listener.set_inheritable(True)
    return _with_keepalive(listener)


def _with_keepalive(listener: socket.socket) -> socket.socket:
    """Inherited by what it accepts."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return listener


def listen_together(host: str, port: int, count: int) -> list[socket.socket]:
    """So many sockets on one port, among which the kernel shares out what comes. Raises OSError."""
    with listen(host, port) as probe:  # SO_REUSEPORT would let us share it with a gateway that is there already
        family, port = probe.family, probe.getsockname()[1]
    listeners: list[socket.socket] = []
    try:
        for _ in range(count):
            listener = socket.create_server((host, port), family=family, backlog=_BACKLOG, reuse_port=True)
            listeners.append(_with_keepalive(listener))
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what is bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address_of(listener: socket.socket) -> str:
    if listener.family == socket.AF_UNIX:
        return str(listener.getsockname())
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
