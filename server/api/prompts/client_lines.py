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

from msgspec import structs

from server.schema.intent import Conversation

CLIENT_LINES: Final[Mapping[str, re.Pattern[str]]] = {
    "claude-code-billing": re.compile(
        r"x-anthropic-billing-header: ?[a-z_]+=[^;\s]*(; ?[a-z_]+=[^;\s]*)*;? ?\r?(\n|\Z)"
    ),
}
"""Patterns of known lines, by name: the metric's `rule` label."""
MAX_LINE_CHARS: Final = 1024
"""Longer lines are not compared."""


def body_without_line(fields: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return a chat's body without the known line that begins its system prompt, and the line's rule; "" if none."""
    value: Any = fields.get("messages")
    first = value[0] if isinstance(value, list) and value and isinstance(value[0], dict) else {}
    rest, rule = _rest(first.get("content") if first.get("role") in ("system", "developer") else None)
    if not rule:
        return fields, ""
    first_left = [value[0] | {"content": rest}] if rest or len(value) == 1 else []
    return {**fields, "messages": [*first_left, *value[1:]]}, rule


def conversation_without_line(conversation: Conversation) -> tuple[Conversation, str]:
    """Return the conversation without the known line that begins its system prompt, and the line's rule; "" if none.

    A part of the content that becomes empty is removed too, and so is a system message.
    """
    first = conversation.messages[0] if conversation.messages else None
    if first is None or first.role not in ("system", "developer"):
        return conversation, ""
    content, rule = _rest(first.content)
    if not rule:
        return conversation, ""
    others = conversation.messages[1:]
    is_empty = not (content if isinstance(content, str) else any(part.text or part.refusal for part in content))
    if is_empty and others:  # templates need a message
        return replace(conversation, messages=others, num_removed=1), rule
    return replace(conversation, messages=[structs.replace(first, content=content), *others]), rule


def _rest(content: Any) -> tuple[Any, str]:
    """Return a text, or its parts, without the known line that begins it, and the line's rule; "" if none."""
    text, part = content, None
    if isinstance(content, list) and content:
        part = content[0]
        text = part.get("text") if isinstance(part, dict) else getattr(part, "text", None)
    for rule, line in CLIENT_LINES.items() if isinstance(text, str) else ():
        match = line.match(text, 0, MAX_LINE_CHARS + 1)
        if match is not None and (match[2] or match.end() == len(text)):
            rest = text[match.end() :]
            if part is None:
                return rest, rule
            left = part | {"text": rest} if isinstance(part, dict) else structs.replace(part, text=rest)
            return [*([left] if rest else ()), *content[1:]], rule
    return content, ""
