"""Hints for the router in a request's headers: its session, the affinity to a worker, and a time to first token."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from server.errors import TTFT_BUDGET, InvalidRequestError

AFFINITY: Final = "x-headstart-affinity"
"""The request header that asks for `soft` or `hard` affinity."""
SESSION_HEADERS: Final = (
    "x-session-affinity",  # OpenCode, Kilo Code
    "x-opencode-session",
    "x-kilocode-taskid",
    "x-claude-code-session-id",
    "session-id",  # Codex
    "session_id",  # older Codex
    "x-openwebui-chat-id",
    "x-litellm-session-id",
    "x-session-id",
)
"""Headers in which agents name their conversation; the first one present counts."""

_SESSION_NAMES: Final = tuple(name.encode() for name in SESSION_HEADERS)
_WANTED: Final = frozenset((TTFT_BUDGET.encode(), AFFINITY.encode(), *_SESSION_NAMES))


class RoutingHints(Struct, frozen=True, eq=False):
    """Routing hints from request headers."""

    session: str | None = None
    """The conversation's name from the client."""
    hard_affinity: bool = False
    """Send the session to one worker, even if another would be faster."""
    ttft_budget_s: float | None = None
    """Refuse the request rather than use a worker with a later first token."""


NO_HINTS: Final = RoutingHints()


def read_hints(headers: Iterable[tuple[bytes, bytes]]) -> RoutingHints:
    """Read the hints from a request's headers. Raises InvalidRequestError."""
    found = {name: value for name, value in headers if name in _WANTED}
    if not found:
        return NO_HINTS
    session = next((value.decode("latin-1") for name in _SESSION_NAMES if (value := found.get(name))), None)
    affinity, budget = found.get(AFFINITY.encode(), b"soft"), found.get(TTFT_BUDGET.encode())
    if affinity not in (b"soft", b"hard"):
        raise _wrong(AFFINITY, "'soft' or 'hard'", affinity)
    if budget is None:
        return RoutingHints(session, affinity == b"hard")
    try:
        budget_s = float(budget)
    except ValueError:
        budget_s = math.nan
    if not 0.0 < budget_s < math.inf:
        raise _wrong(TTFT_BUDGET, "seconds, such as 0.5,", budget)
    return RoutingHints(session, affinity == b"hard", budget_s)


def _wrong(name: str, wanted: str, value: bytes) -> InvalidRequestError:
    message = f"{name}: give {wanted} instead of {value.decode('latin-1')[:40]!r}."
    return InvalidRequestError(message, param=name)
