"""{"name": ..., "parameters": {...}}; ... as the whole answer, also after <|python_tag|>        Llama 3"""

from __future__ import annotations

from typing import Final

from server.text.call_syntax import call_of, cut_name, is_json, match_head
from server.text.formats.base import CallRules, CallSchemas, Reading, TextReader, ToolFormat

_TAG: Final = "<|python_tag|>"


def _is_used_by(template: str) -> bool:
    return _TAG in template or ("ipython" in template and "parameters" in template)


def _read(reader: TextReader) -> Reading:
    """Accept a call only as the whole answer and with a known tool's name: other JSON is content."""
    while True:
        text = reader.text.lstrip()
        head = match_head(text.removeprefix(_TAG))
        if (head == "partial" or _TAG.startswith(text)) and not reader.ended:
            yield
        elif isinstance(head, tuple) and head[0] in reader.tool_names:
            reader.text = text.removeprefix(_TAG).lstrip()
            yield from reader.call()
            yield from reader.skip("; \t\r\n")
        else:
            if head == "partial":
                _read_cut(reader, text)
            return


def _read_cut(reader: TextReader, text: str) -> None:
    """Read a call that the end of the answer cuts before its arguments, or one with its keys in another order."""
    name = cut_name(text)
    if name not in reader.tool_names:
        return
    whole = text.removeprefix(_TAG)
    name, arguments = call_of(whole) or (name or "", "")
    if name in reader.tool_names and (arguments or is_json(whole, cut=True)):
        reader.emit("call", name)
        reader.emit("arguments", arguments)
        reader.text = ""


def _call_rules(schemas: CallSchemas) -> CallRules:
    return CallRules('call ("; " call)*' if schemas.parallel else "call", "body", schemas.one("parameters"))


LLAMA3: Final = ToolFormat("llama3", (_TAG,), _is_used_by, _read, _call_rules)
