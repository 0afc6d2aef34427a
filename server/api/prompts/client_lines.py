"""Lines that agents put first into prompts for their vendor's servers. They mean nothing to a model.

Such a line differs from one conversation to the next. The prompts then differ in their first tokens, and the long
prefix that they share is computed again. docs/api.md has the same table, with the reasons, and lists the lines that
stay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec
from msgspec import Raw, structs

from server.schema.fields import TextPart
from server.schema.intent import Conversation

CLIENT_LINES: Final[Mapping[str, re.Pattern[str]]] = {
    "claude-code-billing": re.compile(
        r"x-anthropic-billing-header: ?[a-z_]+=[^;\s]*(; ?[a-z_]+=[^;\s]*)*;? ?\r?(\n|\Z)"
    ),
}
"""Each line by its rule, its name in the metric."""
MAX_LINE_CHARS: Final = 1024
"""Longer lines are not compared."""


def without_line(fields: dict[str, Any], lead: str, messages: str) -> tuple[dict[str, Any], str]:
    """Return a body without the known line that begins its system prompt, and the line's rule; "" if none.

    `lead` and `messages` name the fields of the system prompt and of the messages; no field is called "".
    """
    field = lead if lead in fields else messages
    value = decoded = _decoded(fields.get(field))
    if field == messages:
        first = decoded[0] if isinstance(decoded, list) and decoded and isinstance(decoded[0], dict) else {}
        value = first.get("content") if first.get("role") in ("system", "developer") else None
    parts = value if isinstance(value, list) and value and isinstance(value[0], dict) else None
    text = value if parts is None else parts[0].get("text")
    rule, end = _line(text) if isinstance(text, str) else ("", 0)
    if not rule or not isinstance(text, str):
        return fields, ""
    rest: Any = text[end:]
    if parts is not None:
        rest = [*([parts[0] | {"text": rest}] if rest else ()), *parts[1:]]
    if field == lead:
        return {**{n: v for n, v in fields.items() if n != lead}, **({lead: rest} if rest else {})}, rule
    first_left = [decoded[0] | {"content": rest}] if rest or len(decoded) == 1 else []
    return {**fields, messages: [*first_left, *decoded[1:]]}, rule


def _decoded(value: Any) -> Any:
    return msgspec.json.decode(value) if isinstance(value, Raw) else value


def _line(text: str) -> tuple[str, int]:
    """Return the rule of the known line that begins a text, and its end; "" for none."""
    matches = {rule: line.match(text, 0, MAX_LINE_CHARS + 1) for rule, line in CLIENT_LINES.items()}
    ends = [(rule, m.end()) for rule, m in matches.items() if m is not None and (m[2] or m.end() == len(text))]
    return ends[0] if ends else ("", 0)


def without_client_lines(conversation: Conversation) -> tuple[Conversation, str]:
    """Return the conversation without the known line that begins its system prompt, and the line's rule; "" if none.

    A part of the content that becomes empty is removed too, and so is a system message.
    """
    first = conversation.messages[0] if conversation.messages else None
    if first is None or first.role not in ("system", "developer") or not first.content:
        return conversation, ""
    text = first.content if isinstance(first.content, str) else first.content[0].text or ""
    rule, end = _line(text)
    if not rule:
        return conversation, ""
    content: str | list[TextPart] = text[end:]
    if isinstance(first.content, list):
        content = [*([structs.replace(first.content[0], text=content)] if content else ()), *first.content[1:]]
    others = conversation.messages[1:]
    is_empty = not (content if isinstance(content, str) else any(part.text or part.refusal for part in content))
    if is_empty and others:  # templates need a message
        return replace(conversation, messages=others, num_removed=1), rule
    return replace(conversation, messages=[structs.replace(first, content=content), *others]), rule
