"""Tools, parts and fields that are left out: refused, or named in a header of the answer."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Final

from server.request_context import CURRENT
from server.schema.decoding import unsupported
from server.schema.intent import ChatIntent

log = logging.getLogger(__name__)

MAX_LOGGED: Final = 256
"""The limit of logged types, which clients choose freely."""
_OF_CLIENTS: Final = frozenset({"function", "custom", "namespace"})
"""Types of tools that a client runs."""


class IgnoredTools:
    """The types of tools and parts that this gateway has left out. Owned by the gateway."""

    def __init__(self, *, strict_tools: bool, strict_blocks: bool) -> None:
        """Strict: refuse them."""
        self._strict_tools = strict_tools
        self._strict_blocks = strict_blocks
        self._logged: set[str] = set()

    def take(self, intent: ChatIntent) -> None:
        """Name what a chat leaves out, and its hints without effect. Raises InvalidRequestError for what is refused."""
        ignored = intent.ignored
        for each in ignored:
            if each.is_block and self._strict_blocks:
                raise unsupported(each.field, f"is {each.type[:64]!r}: this model reads text (--strict-blocks)")
            if not each.is_block:
                self._check_tool(each.field, each.type)
        self.name([each.type for each in ignored])
        CURRENT.get().ignore(intent.fields.ignored_hints)

    def without(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return a body for an engine without the tools of vendors. Raises InvalidRequestError if they are refused."""
        tools = fields.get("tools")
        if not isinstance(tools, list):
            return fields
        types = [tool.get("type") if isinstance(tool, dict) else None for tool in tools]
        left_out = [kind for kind in types if isinstance(kind, str) and kind not in _OF_CLIENTS]
        if not left_out:
            return fields
        self._check_tool(f"tools[{types.index(left_out[0])}].type", left_out[0])
        kept = [tool for tool, kind in zip(tools, types, strict=True) if kind not in left_out]
        if not kept and _requires_call(fields.get("tool_choice")):
            raise unsupported("tool_choice", f"asks for a call, and this server cannot run {', '.join(left_out)[:256]}")
        others = {name: value for name, value in fields.items() if name != "tools" and (kept or name != "tool_choice")}
        self.name(left_out)
        return others | ({"tools": kept} if kept else {})

    def _check_tool(self, field: str, kind: str) -> None:
        if self._strict_tools:
            raise unsupported(field, f"is {kind[:64]!r}, which this server cannot run (--strict-tools)")

    def name(self, kinds: Iterable[str]) -> None:
        """Name types, or fields, in the header, and log new ones."""
        for kind in CURRENT.get().ignore(kinds):
            if kind not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(kind)
                log.warning("left %s out of a request: this server or its model cannot use it", kind)


def _requires_call(choice: Any) -> bool:
    if isinstance(choice, dict):
        choice = choice.get("allowed_tools") or choice
        choice = choice.get("mode", choice.get("type")) if isinstance(choice, dict) else choice
    return choice not in (None, "auto", "none")
