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
    return RoutingHints(session, _hard_affinity(found), _ttft_budget_s(found))


def _hard_affinity(found: dict[bytes, bytes]) -> bool:
    value = found.get(AFFINITY.encode(), b"soft")
    if value not in (b"soft", b"hard"):
        message = f"{AFFINITY}: give 'soft' or 'hard' instead of {value.decode('latin-1')[:40]!r}."
        raise InvalidRequestError(message, param=AFFINITY)
    return value == b"hard"


def _ttft_budget_s(found: dict[bytes, bytes]) -> float | None:
    value = found.get(TTFT_BUDGET.encode())
    if value is None:
        return None
    try:
        budget_s = float(value)
    except ValueError:
        budget_s = math.nan
    if not 0.0 < budget_s < math.inf:
        message = f"{TTFT_BUDGET}: give seconds, such as 0.5, instead of {value.decode('latin-1')[:40]!r}."
        raise InvalidRequestError(message, param=TTFT_BUDGET)
    return budget_s
