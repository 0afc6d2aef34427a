"""The limits of a port and of its connections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class HttpLimits:
    header_timeout_s: float
    body_timeout_s: float
    max_connections: int
    drain_grace_s: float
    keep_alive_s: float
    """How long an idle connection stays open. A balancer that keeps it for longer would send a request as it closes."""


class Connection(Protocol):
    """A connection that the limit may close; hashed by identity."""

    def drop(self) -> None:
        """Abort the connection, which has no request."""


class ConnectionLimit:
    """A bound on the open connections of a port: the connection idle longest is closed for a new one."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._num_open = 0
        self.keeps_alive = True
        """False once the port will close: each answer ends its connection, and clients open the next one elsewhere."""
        self._waiting: dict[Connection, None] = {}
        """Connections without a complete head, the longest wait first."""

    def open(self, connection: Connection) -> bool:
        """Return False if this connection has to be closed: all others have a request."""
        self._num_open += 1
        self._waiting[connection] = None
        if self._num_open <= self._max_connections:
            return True
        oldest = next(iter(self._waiting))
        if oldest is connection:
            return False
        del self._waiting[oldest]
        oldest.drop()
        return True

    def begin(self, connection: Connection) -> None:
        """Mark the connection as busy: the head of its request is complete."""
        self._waiting.pop(connection, None)

    def end(self, connection: Connection) -> None:
        """Mark the connection as idle: its request was answered."""
        self._waiting[connection] = None

    def close(self, connection: Connection) -> None:
        """Call once for each `open`."""
        self._num_open -= 1
        self._waiting.pop(connection, None)
