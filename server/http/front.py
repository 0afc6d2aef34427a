"""Listening sockets, and the server on each."""

from __future__ import annotations

import socket

from server.http.server import HttpServer


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
