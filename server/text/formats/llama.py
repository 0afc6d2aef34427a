"""Calls without markers, or with one at the beginning: only the whole answer can be calls, and only of known tools.

{"name": ..., "parameters": {...}}; ...                 Llama 3, Llama 4
[NAME(KEY="VALUE"), ...]                                 Llama 4, Gemma 3 and others as their prompt asks
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from server.text.call_syntax import call_of, cut_name, is_json, match_head
from server.text.formats.base import Reading, TextReader, ToolFormat
from server.text.formats.calls import Syntax, Written, read_python_calls
from server.text.formats.grammar import call_rules

_TAGS: Final = ("<|python_tag|>", "<|python_start|>")
_END: Final = "<|python_end|>"
_OBJECTS: Final = Syntax((), (), "object", Written(("", "", ""), separator="; ", arguments_key="parameters"))
_FUNCTIONS: Final = Syntax((), (), "python", Written(("", "(", ")"), ("[", "]"), ", "))


def _read(reader: TextReader) -> Reading:
    """Accept a call only as the whole answer and with a known tool's name: other text is content."""
    while True:
        text = reader.text.lstrip()
        tag = next((tag for tag in _TAGS if text.startswith(tag)), "")
        body = text.removeprefix(tag).lstrip()
        head = match_head(body)
        is_open = head == "partial" or (not tag and any(tag.startswith(text) for tag in _TAGS))
        if is_open and not reader.ended:
            yield
        elif body[:1] == "[":
            before, reader.text = reader.text[: len(reader.text) - len(body)], body
            if not (yield from read_python_calls(reader, is_known=True)):
                reader.text = before + reader.text
                return
            yield from reader.skip("; \t\r\n")
        elif isinstance(head, tuple) and head[0] in reader.tool_names:
            reader.text = body
            yield from reader.call()
            yield from reader.skip("; \t\r\n")
        else:
            if head == "partial":
                _read_cut(reader, body)
            return
        if (yield from reader.starts((_END,))):
            reader.text = reader.text[len(_END) :]


def _read_cut(reader: TextReader, body: str) -> None:
    """Read a call that is cut before its arguments, or one with its keys in another order."""
    name = cut_name(body)
    if name not in reader.tool_names:
        return
    name, arguments = call_of(body) or (name or "", "")
    if name in reader.tool_names and (arguments or is_json(body, cut=True)):
        reader.emit("call", name)
        reader.emit("arguments", arguments)
        reader.text = ""


def _is_python(template: str) -> bool:
    return "func_name1(" in template or "[func_name(" in template


def _is_llama(template: str) -> bool:
    has_header = "<|header_start|>" in template and "tools" in template
    return any(tag in template for tag in _TAGS) or has_header or ("ipython" in template and "parameters" in template)


def _format(name: str, is_used_by: Callable[[str], bool], syntax: Syntax) -> ToolFormat:
    return ToolFormat(name, (*_TAGS, _END), is_used_by, _read, partial(call_rules, syntax))


PYTHONIC: Final = _format("pythonic", _is_python, _FUNCTIONS)
LLAMA: Final = _format("llama", _is_llama, _OBJECTS)
