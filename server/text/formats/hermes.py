"""<tool_call>{"name": ..., "arguments": {...}}</tool_call> ...        Qwen, Hermes, SmolLM3"""

from __future__ import annotations

from typing import Final

from server.text.formats.base import CallRules, CallSchemas, Reading, TextReader, ToolFormat

_MARKERS: Final = ("<tool_call>", "</tool_call>")


def _read(reader: TextReader) -> Reading:
    while (yield from reader.until("<tool_call>", reader.emit_content)):
        if (yield from reader.skip()) == "{":
            yield from reader.call()
            closed = yield from reader.begins("</tool_call>")
            if not closed and reader.ended and "</tool_call>".startswith(reader.text.lstrip()):
                reader.text = ""  # the text ends within the marker


def _call_rules(schemas: CallSchemas) -> CallRules:
    start, end = map(schemas.marker, _MARKERS)
    calls = 'call ("\\n" call)*' if schemas.parallel else "call"
    return CallRules(calls, f'{start} "\\n" body "\\n" {end}', schemas.one("arguments"))


HERMES: Final = ToolFormat("hermes", _MARKERS, lambda template: _MARKERS[0] in template, _read, _call_rules)
