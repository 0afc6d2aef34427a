"""The ways in which model families write tool calls and reasoning.

A new format is a row of `table` or `reasoning`. One of another kind is a module with a `ToolFormat`, listed here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from server.text.formats.base import GrammarTools, Reading, TextReader, ToolFormat
from server.text.formats.harmony import HARMONY
from server.text.formats.llama import LLAMA3, LLAMA4, PYTHONIC
from server.text.formats.table import ROWS

_ALL: Final = (HARMONY, PYTHONIC, *(row.format() for row in ROWS), LLAMA4, LLAMA3)
"""The first that a template mentions is taken."""
FORMATS: Final = {each.name: each for each in sorted(_ALL, key=lambda each: each.name)}


def format_of(template: str, tokens: Collection[str] = ()) -> ToolFormat | None:
    """Return the format that a chat template mentions, or else that a vocabulary has tokens for; None: unknown."""
    if (mentioned := next((each for each in _ALL if each.is_used_by(template)), None)) is not None:
        return mentioned
    return next((each for each in _ALL if each.tokens and set(each.tokens) <= set(tokens)), None)


def _read_list(reader: TextReader) -> Reading:
    while (yield from reader.skip()) == "[":
        yield from reader.call_list(is_held=True)


def _no_rules(tools: GrammarTools) -> list[str]:
    raise NotImplementedError("a JSON schema holds the list")


CALL_LIST: Final = ToolFormat("list", (), lambda template: False, _read_list, _no_rules)
"""A JSON list of calls, which a grammar enforces for tool_choice "required" where the model's own form is unknown."""
