"""A port: uvicorn on a socket, whose connections count from the moment when they are accepted.

uvicorn's own server counts a TLS connection after its handshake, which a silent one never begins. So a port accepts by
itself. At its limit, and where the process may open no further file, the connection that was silent longest is closed.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final

import uvicorn

from worker.common.connection_limit import ConnectionLimit
from worker.common.http_protocol import StrictProtocol

_ACCEPTED_AT_ONCE: Final = 16  # then those that were accepted have a turn: a flood must not outrun a handshake
_PAUSE_S: Final = 0.1
"""Where no file is left and no connection is silent, accept again after this time."""
_NO_FILES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Accepts the connections of one socket. It has the methods of asyncio's server that uvicorn calls."""

    def __init__(self, sock: socket.socket, make: Callable[[], Any], limit: ConnectionLimit, **tls: Any) -> None:
        """`make` returns a new protocol; `tls`: options of the handshake."""
        self._socket, self._make, self._limit, self._tls = sock, make, limit, tls
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[Any]] = set()
        """Connections whose handshake is not over."""
        self._is_closed = False
        sock.setblocking(False)
        self._listen()

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if error.errno in _NO_FILES and not self._limit.drop_oldest():
                    self._loop.remove_reader(self._socket.fileno())
                    self._loop.call_later(_PAUSE_S, self._listen)
                return  # none is left, or the file of the dropped one is free in the next turn
            self._open(connection)

    def _open(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        protocol = self._make()
        task = self._loop.create_task(self._loop.connect_accepted_socket(lambda: protocol, connection, **self._tls))
        self._opening.add(task)
        task.add_done_callback(partial(self._opened, protocol, connection))
        if not self._limit.open(protocol, task.cancel):
            task.cancel()

    def _opened(self, protocol: object, connection: socket.socket, task: asyncio.Task[Any]) -> None:
        self._opening.discard(task)
        if task.cancelled() or task.exception() is not None:  # a broken handshake is the client's matter
            self._limit.close(protocol)
            connection.close()

    def close(self) -> None:
        """Stop accepting, and close the socket."""
        self._is_closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        for task in self._opening:
            task.cancel()

    async def wait_closed(self) -> None:
        """Return: `close` has done all."""


class Listener(uvicorn.Server):
    """One port. Signals are left to its owner, which sets `should_exit`."""

    def __init__(self, config: uvicorn.Config, limit: ConnectionLimit, handshake_s: float) -> None:
        """`handshake_s`: the longest TLS handshake. uvloop's may take 60 s by default."""
        super().__init__(config)
        self.limit = limit
        self._handshake_s = handshake_s

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does, with an acceptor for each socket."""
        tls = {"ssl": self.config.ssl, "ssl_handshake_timeout": self._handshake_s} if self.config.ssl else {}
        acceptors: list[Any] = [Acceptor(sock, self.connection, self.limit, **tls) for sock in sockets or ()]
        self.servers = acceptors
        self.started = True

    def connection(self) -> StrictProtocol:
        """Return the protocol of a new connection."""
        return StrictProtocol(self.config, self.server_state, {}, asyncio.get_running_loop(), limit=self.limit)
