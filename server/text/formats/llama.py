"""Calls without markers, or with one at the beginning: only of known tools, and only at the beginning of a line.

{"name": ..., "parameters": {...}}; ...                 Llama 3, Llama 4
[NAME(KEY="VALUE"), ...]                                 Llama 4, Gemma 3 and others as their prompt asks
"""

from __future__ import annotations

import ast
import json
import re
from functools import partial
from typing import Final

from server.text.call_syntax import call_of, cut_name, is_json, match_head
from server.text.formats.arguments import literal
from server.text.formats.base import Checking, Reading, TextReader, ToolFormat
from server.text.formats.calls import MAX_NAME_CHARS, CallForm, Syntax
from server.text.formats.grammar import call_rules

_TAGS: Final = ("<|python_tag|>", "<|python_start|>")
_END: Final = "<|python_end|>"
_LINES: Final = ("\n{", *_TAGS)
_FUNCTION: Final = re.compile(r"[\[,]\s*([^\W\d][\w.-]*)\(")
_FUNCTION_START: Final = re.compile(r"(?:[\[,]\s*(?:[^\W\d][\w.-]*)?)?")
_STOP: Final = re.compile(r"\\.?|[\"'(){}\[\]]", re.DOTALL)
_OBJECTS: Final = Syntax((), (), CallForm(("", "", ""), separator="; ", arguments_key="parameters"), "object")
_FUNCTIONS: Final = Syntax((), (), CallForm(("", "(", ")"), ("[", "]"), ", "), "python")


def _read(reader: TextReader) -> Reading:
    """Accept a call only at the beginning of the answer or of a line, and with a known tool's name."""
    while True:
        text = reader.text.lstrip()
        tag = next((tag for tag in _TAGS if text.startswith(tag)), "")
        body = text.removeprefix(tag).lstrip()
        head = match_head(body)
        is_open = head == "partial" or (not tag and any(tag.startswith(text) for tag in _TAGS))
        if is_open and not reader.ended:
            yield
            continue
        if body[:1] == "[":
            before, reader.text = reader.text[: len(reader.text) - len(body)], body
            if not (yield from _read_functions(reader)):
                reader.text = before + reader.text
                if not (yield from _pass_on(reader, len(before) + 1)):
                    return
                continue
            yield from reader.skip("; \t\r\n")
        elif isinstance(head, tuple) and head[0] in reader.tool_names:
            reader.text = body
            yield from reader.call()
            yield from reader.skip("; \t\r\n")
        else:
            if head == "partial":
                _read_cut(reader, body)
            if not (yield from _pass_on(reader, len(reader.text) - len(body) + 1)):
                return
        if (yield from reader.starts((_END,))):
            reader.text = reader.text[len(_END) :]


def _pass_on(reader: TextReader, size: int) -> Checking:
    """Pass on text that begins with no call, at least `size` characters. Return whether a line after it may."""
    reader.emit_content(reader.text[:size])
    reader.text = reader.text[size:]
    found = yield from reader.before(_LINES, reader.emit_content)
    if found[:1] == "\n":
        reader.emit_content("\n")
        reader.text = reader.text[1:]
    return bool(found)


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


def _read_functions(reader: TextReader) -> Checking:
    """Read a list of calls, each when it is complete. Return False, and leave the text, if there is none."""
    has_call = False
    while True:
        while (head := _FUNCTION.match(reader.text)) is None and not reader.ended:
            if len(reader.text) > MAX_NAME_CHARS or not _FUNCTION_START.fullmatch(reader.text):
                break
            yield
        if head is None or head[1] not in reader.tool_names:
            break
        before, reader.text = head[0], reader.text[head.end() :]
        parts: list[str] = []
        yield from reader.value(parts.append, depth=1, stops=_STOP)
        text = "".join(parts)
        if (arguments := _keywords(text)) is None:
            reader.text = before + text + reader.text
            break
        reader.emit("call", head[1])
        reader.emit("arguments", arguments)
        has_call = True
        yield from reader.space()
    if has_call and reader.text[:1] == "]":
        reader.text = reader.text[1:]
    return has_call


def _keywords(text: str) -> str | None:
    """Return keyword arguments and their parenthesis as JSON; None for other text. Strings may hold line breaks."""
    for given in (text, text.replace("\n", "\\n")):
        try:
            call = ast.parse(f"f({given}", mode="eval").body
            if isinstance(call, ast.Call) and not call.args:
                return json.dumps({each.arg: literal(each.value) for each in call.keywords}, ensure_ascii=False)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return None


def _is_python(template: str) -> bool:
    return "func_name1(" in template or "[func_name(" in template


def _is_llama(template: str) -> bool:
    has_header = "<|header_start|>" in template and "tools" in template
    return any(tag in template for tag in _TAGS) or has_header or ("ipython" in template and "parameters" in template)


PYTHONIC: Final = ToolFormat("pythonic", (*_TAGS, _END), _is_python, _read, partial(call_rules, _FUNCTIONS))
LLAMA: Final = ToolFormat("llama", (*_TAGS, _END), _is_llama, _read, partial(call_rules, _OBJECTS))
