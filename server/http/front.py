"""Listening sockets, and the server on each."""

from __future__ import annotations

import ipaddress
import socket

from server.http.server import HttpServer

_BACKLOG = 2048


class Listener:
    """One server on one listening socket."""

    def __init__(self, server: HttpServer, sock: socket.socket) -> None:
        self._server = server
        self._socket = sock

    @property
    def address(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def serve(self) -> None:
        """Take requests until `stop`; return when the last open one has ended, or its grace is over."""
        await self._server.serve([self._socket])

    def stop(self) -> None:
        """Take no new connections."""
        self._server.should_exit = True

    def force(self) -> None:
        """Wait for no open request."""
        self._server.force_exit = True


def listen(host: str, port: int, *, share: bool = False) -> socket.socket:
    """Bind and listen; with `share`, other sockets that share may listen on the same port. Raises OSError.

    The kernel spreads new connections over the sockets that share a port.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        sock = socket.create_server((host, port), family=family, backlog=_BACKLOG, reuse_port=share)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(
            f"cannot listen on {host}:{port}: {reason}. Choose other ports with --port and --ops-port; "
            "`headstart doctor` tells which are free"
        ) from error
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # accepted connections inherit it
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what is bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
