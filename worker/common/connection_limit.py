"""The bound on the open connections of a port."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ConnectionLimit:
    """A bound on the open connections of a port: for a new one, the oldest that never sent a request is closed.

    Without one, it is the connection idle longest.
    """

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._open: set[Any] = set()
        self.keeps_alive = True
        """False once the port will close: each answer ends its connection, and clients open the next one elsewhere."""
        self._silent: dict[Any, Callable[[], object]] = {}
        """Connections that have sent no whole head yet, the oldest first, and how to drop them."""
        self._idle: dict[Any, None] = {}
        """Connections whose requests were answered, the longest wait first."""

    def open(self, connection: object, drop: Callable[[], object]) -> bool:
        """Count a new connection. Return False, without counting it, if all others have a request."""
        if len(self._open) >= self._max_connections and not self.drop_oldest():
            return False
        self._open.add(connection)
        self._silent[connection] = drop
        return True

    def drop_oldest(self) -> bool:
        """Drop the oldest silent connection, or else the one idle longest. Return False if all have a request."""
        oldest = next(iter(self._silent or self._idle), None)
        if oldest is None:
            return False
        drop = self._silent.get(oldest) or oldest.drop
        self.close(oldest)
        drop()
        return True

    def made(self, connection: Any) -> None:
        """Note that the connection has its transport, by which it is dropped after this."""
        if connection in self._silent:
            self._silent[connection] = connection.drop

    def begin(self, connection: object) -> None:
        """Mark the connection as busy: the head of its request is complete."""
        self._silent.pop(connection, None)
        self._idle.pop(connection, None)

    def end(self, connection: object) -> None:
        """Mark an open connection as idle: its request was answered."""
        if connection in self._open:
            self._idle[connection] = None

    def close(self, connection: object) -> None:
        """Forget the connection."""
        self.begin(connection)
        self._open.discard(connection)
