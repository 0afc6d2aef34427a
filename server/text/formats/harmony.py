"""Harmony, gpt-oss's format: an answer is messages, each on a channel.

    <|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>content<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

Source: https://developers.openai.com/cookbook/articles/openai-harmony
"""

from __future__ import annotations

import re
from functools import partial
from typing import Final

from server.text.formats.base import GrammarTools, Reading, TextReader, ToolFormat

_OPENS: Final = ("<|start|>", "<|channel|>")
_ENDS: Final = ("<|end|>", "<|return|>", "<|call|>")
_MESSAGE: Final = "<|message|>"
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"\bto=([\w.:/-]+)")
_HEADER: Final = re.compile(
    r"(?:<\|start\|>\s*[a-z]*)?(?:\s+to=[\w.:/-]*)?\s*(?:<\|channel\|>\s*[a-z]*)?(?:\s+to=[\w.:/-]*)?"
    r"\s*(?:<\|constrain\|>)?\s*[a-z]*(?:<[|a-z]*>?)?"
)


def _read(reader: TextReader) -> Reading:
    """Read an answer. It begins inside a header: the prompt ends with `<|start|>assistant`."""
    opens: tuple[str, ...] = (" to=", *_OPENS)
    while True:
        if (yield from reader.starts(opens)):
            yield from _message(reader)
        elif not (yield from reader.before(_OPENS, reader.emit_content)):
            return
        opens = _OPENS


def _message(reader: TextReader) -> Reading:
    """Read a header, and a message up to its end. Text that is no header is emitted as content, so none is lost."""
    parts: list[str] = []
    found = yield from reader.until((_MESSAGE,), parts.append)
    header = "".join(parts)
    if _HEADER.fullmatch(header) is None:
        reader.emit_content(header + found)
    if not found:  # the text ends within the header
        return
    channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
    name = "" if recipient is None else recipient[1].removeprefix("functions.")
    emit = reader.emit_content
    # Without the prefix, a recipient that is no tool is one of gpt-oss's own (`browser`, `python`).
    if recipient is not None and reader.tool_names and (name != recipient[1] or name in reader.tool_names):
        reader.emit("call", name)
        emit = partial(reader.emit, "arguments")
    elif channel is not None and channel[1] == "analysis":
        reader.thinking = True
        emit = partial(reader.emit, "reasoning")
    end = yield from reader.before((*_ENDS, *_OPENS), emit)
    reader.text = reader.text[len(end) if end in _ENDS else 0 :]
    if reader.thinking:
        reader.end_thoughts()


def _rules(tools: GrammarTools) -> list[str]:
    """Return the rules for one call: after `<|call|>` the answer ends."""
    before = "<|channel|>commentary to=functions.{} <|constrain|>json" + _MESSAGE
    names = list(enumerate(tools.parameters))
    calls = (f"{tools.literal(before.format(name))} arguments_{number}" for number, name in names)
    bodies = (f"arguments_{number}: {tools.json(tools.ref(name))}" for number, name in names)
    return ["calls: " + " | ".join(calls), *bodies]


HARMONY: Final = ToolFormat(
    "gpt_oss",
    (*_OPENS, _MESSAGE, *_ENDS, "<|constrain|>"),
    lambda template: "<|channel|>" in template and _MESSAGE in template,
    _read,
    _rules,
    tokens=("<|channel|>", "<|constrain|>"),
    has_channels=True,
)
