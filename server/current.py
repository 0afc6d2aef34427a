"""The request that the running task works for, for those who are not handed it: the log and the traces."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from server.tracing import RequestTrace


class CurrentRequest(Protocol):
    @property
    def request_id(self) -> str: ...

    @property
    def trace(self) -> RequestTrace | None:
        """None: not traced, or not sampled."""


CURRENT: Final[ContextVar[CurrentRequest | None]] = ContextVar("current_request", default=None)
