"""Tools that are left out of prompts, and hints without effect: refused, or named in a header."""

from __future__ import annotations

import logging
import re
from typing import Final

from server.schema.decoding import unsupported
from server.schema.intent import ChatIntent

log = logging.getLogger(__name__)

HEADER: Final = "x-headstart-ignored"
MAX_NAMED: Final = 32
"""Types in one header."""
MAX_LOGGED: Final = 256
"""The limit of logged types, which clients choose freely."""
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.-]")


class IgnoredTools:
    """The types of tools that this gateway has left out. Owned by the gateway."""

    def __init__(self, *, strict: bool) -> None:
        """`strict`: refuse them."""
        self._strict = strict
        self._logged: set[str] = set()

    def take(self, intent: ChatIntent) -> str:
        """Return the header's value; "" for none. Raises InvalidRequestError when tools are refused."""
        ignored = intent.ignored
        if ignored and self._strict:
            first = ignored[0]
            raise unsupported(first.field, f"is {first.type[:64]!r}, which this server cannot run (--strict-tools)")
        types = list(dict.fromkeys(_UNSAFE.sub("?", each.type[:64]) for each in ignored))
        for kind in types:
            if kind not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(kind)
                log.warning("left %s out of a prompt: this server cannot run it", kind)
        return ", ".join([*types[:MAX_NAMED], *intent.fields.ignored_hints])


def ignored_header(names: str) -> dict[str, str]:
    """Return the header with these names; empty for none."""
    return {HEADER: names} if names else {}
