"""The ways in which model families write tool calls, one module each.

A new format is a module with a `ToolFormat`, and its place in `_ALL`.
"""

from __future__ import annotations

from typing import Final

from server.text.formats.base import CallRules, CallSchemas, Reading, TextReader, ToolFormat
from server.text.formats.hermes import HERMES
from server.text.formats.llama3 import LLAMA3
from server.text.formats.mistral import MISTRAL

_ALL: Final = (MISTRAL, LLAMA3, HERMES)
"""The first that a template mentions is taken."""
FORMATS: Final = {each.name: each for each in sorted(_ALL, key=lambda each: each.name)}


def format_of(template: str) -> ToolFormat | None:
    """Return the format that a chat template mentions, if any."""
    return next((each for each in _ALL if each.is_used_by(template)), None)


def _read_list(reader: TextReader) -> Reading:
    while (yield from reader.skip()) == "[" and (yield from reader.call_list(is_held=True)):
        pass


def _list_rules(schemas: CallSchemas) -> CallRules:
    return CallRules("call", "body", schemas.many("parameters"))


CALL_LIST: Final = ToolFormat("list", (), lambda template: False, _read_list, _list_rules)
"""A JSON list of calls, which a grammar enforces for tool_choice "required". No template asks for it."""
