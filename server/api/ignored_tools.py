"""The tools that are left out of prompts: refused, or named in a header and once in the log."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Final

from server.schema.decoding import unsupported
from server.schema.tools import Ignored

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

    def take(self, ignored: Sequence[Ignored]) -> str:
        """Return the header's value; "" for none. Raises InvalidRequestError when tools are refused."""
        if not ignored:
            return ""
        if self._strict:
            first = ignored[0]
            raise unsupported(first.field, f"is {first.type[:64]!r}, which this server cannot run (--strict-tools)")
        types = list(dict.fromkeys(_UNSAFE.sub("?", each.type[:64]) for each in ignored))
        for kind in types:
            if kind not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(kind)
                log.warning("left %s out of a prompt: this server cannot run it", kind)
        return ", ".join(types[:MAX_NAMED])


def ignored_header(types: str) -> dict[str, str]:
    """Return the header for the result of `take`; empty for none."""
    return {HEADER: types} if types else {}
