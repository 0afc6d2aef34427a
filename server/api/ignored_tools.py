"""Tools and parts that are left out of prompts, and hints without effect: refused, or named in a header."""

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
    """The types of tools and parts that this gateway has left out. Owned by the gateway."""

    def __init__(self, *, strict_tools: bool, strict_blocks: bool) -> None:
        """Strict: refuse them."""
        self._strict_tools = strict_tools
        self._strict_blocks = strict_blocks
        self._logged: set[str] = set()

    def take(self, intent: ChatIntent) -> str:
        """Return the header's value; "" for none. Raises InvalidRequestError when tools are refused."""
        ignored = intent.ignored
        for each in ignored:
            if each.is_block and self._strict_blocks:
                raise unsupported(each.field, f"is {each.type[:64]!r}: this model reads text (--strict-blocks)")
            if not each.is_block and self._strict_tools:
                raise unsupported(each.field, f"is {each.type[:64]!r}, which this server cannot run (--strict-tools)")
        types = list(dict.fromkeys(_UNSAFE.sub("?", each.type[:64]) for each in ignored))
        for kind in types:
            if kind not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(kind)
                log.warning("left %s out of a prompt: this server or its model cannot use it", kind)
        return ", ".join([*types[:MAX_NAMED], *intent.fields.ignored_hints])


def ignored_header(names: str) -> dict[str, str]:
    """Return the header with these names; empty for none."""
    return {HEADER: names} if names else {}
