"""How many connections a port may have open: clients that send nothing must not keep out those that ask."""

from __future__ import annotations

from typing import Protocol


class Droppable(Protocol):
    def drop(self) -> None:
        """Close the connection; `ConnectionLimit.close` follows."""


class ConnectionLimit:
    """Owned by the event loop. Beyond the limit the one that has waited longest for a request makes room."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._num_open = 0
        self._waiting: dict[Droppable, None] = {}
        """Those without a whole head, the longest first."""

    def open(self, connection: Droppable) -> bool:
        """False: every connection is at work, and this one has to go."""
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

    def begin(self, connection: Droppable) -> None:
        """Its request has a whole head."""
        self._waiting.pop(connection, None)

    def end(self, connection: Droppable) -> None:
        """It is answered, and may send another."""
        self._waiting[connection] = None

    def close(self, connection: Droppable) -> None:
        """Once for each `open`."""
        self._num_open -= 1
        self._waiting.pop(connection, None)
