"""Lines that agents put first into prompts for their vendor's servers. They mean nothing to a model.

Such a line differs from one conversation to the next. The prompts then differ in their first tokens, and the long
prefix that they share is computed again. docs/api.md has the same table, with the reasons, and lists the lines that
stay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from msgspec import structs

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


def without_client_lines(conversation: Conversation) -> tuple[Conversation, str]:
    """Return the conversation without the known line that begins its system prompt, and the line's rule; "" if none.

    A part of the content that becomes empty is removed too, and so is a system message.
    """
    first = conversation.messages[0] if conversation.messages else None
    if first is None or first.role not in ("system", "developer") or not first.content:
        return conversation, ""
    text = first.content if isinstance(first.content, str) else first.content[0].text or ""
    matches = {rule: line.match(text, 0, MAX_LINE_CHARS + 1) for rule, line in CLIENT_LINES.items()}
    ends = {rule: m.end() for rule, m in matches.items() if m is not None and (m[2] or m.end() == len(text))}
    if not ends:
        return conversation, ""
    [(rule, end)] = ends.items()
    content: str | list[TextPart] = text[end:]
    if isinstance(first.content, list):
        content = [*([structs.replace(first.content[0], text=content)] if content else ()), *first.content[1:]]
    others = conversation.messages[1:]
    is_empty = not (content if isinstance(content, str) else any(part.text or part.refusal for part in content))
    if is_empty and others:  # templates need a message
        return replace(conversation, messages=others, num_removed=1), rule
    return replace(conversation, messages=[structs.replace(first, content=content), *others]), rule
