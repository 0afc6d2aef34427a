"""The ways in which model families write tool calls and reasoning.

A new format is a row of `table` or `reasoning`. One of another kind is a module with a `ToolFormat`, listed here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Final

from server.text.formats.base import Checking, Emit, GrammarTools, Reading, TextReader, ToolFormat
from server.text.formats.llama import LLAMA, PYTHONIC
from server.text.formats.table import ROWS

_ALL: Final = (PYTHONIC, *ROWS, LLAMA)
"""More specific ones come first."""
FORMATS: Final = {each.name: each for each in sorted(_ALL, key=lambda each: each.name)}


def formats_of(template: str, tokens: Collection[str] = ()) -> list[ToolFormat]:
    """Return the formats that a chat template mentions, or else that a vocabulary has tokens for. The first is best."""
    mentioned = [each for each in _ALL if each.is_used_by(template)]
    return mentioned or [each for each in _ALL if each.tokens and set(each.tokens) <= set(tokens)]


def with_calls_of(own: ToolFormat, asked: ToolFormat) -> ToolFormat:
    """Return a model's own format, extended to read calls also in the form of `asked`, which a prompt asks for."""
    if own.read_calls is None or asked.read_calls is None or not {*own.opens}.isdisjoint(asked.opens):
        return own
    readers = {opening: each.read_calls for each in (own, asked) for opening in each.opens}

    def read_calls(reader: TextReader, otherwise: Emit) -> Checking:
        opening = next(opening for opening in readers if reader.text.startswith(opening))
        read = readers[opening]
        assert read is not None
        return (yield from read(reader, otherwise))

    def read(reader: TextReader) -> Reading:
        while (yield from reader.before(tuple(readers), reader.emit_content)):
            yield from read_calls(reader, reader.emit_content)

    markers = (*own.markers, *asked.markers)
    return replace(own, markers=markers, opens=tuple(readers), read=read, read_calls=read_calls)


def _read_list(reader: TextReader) -> Reading:
    while (yield from reader.skip()) == "[":
        yield from reader.call_list(is_constrained=True)


def _no_rules(tools: GrammarTools) -> list[str]:
    raise NotImplementedError("a JSON schema holds the list")


CALL_LIST: Final = ToolFormat("list", (), lambda template: False, _read_list, _no_rules)
"""A JSON list of calls, which a grammar enforces for tool_choice "required" where the model's own form is unknown."""
