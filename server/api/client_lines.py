"""Lines that agents put into prompts for their vendor's servers. They mean nothing to a model.

Such a line comes first and differs from one conversation to the next. Two prompts then differ in their first tokens,
and the long prefix that they share is computed again.

docs/api.md has the same table, and lists the lines that stay.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from server.schema.fields import Message, TextPart
from server.schema.intent import Conversation


@dataclass(frozen=True, slots=True)
class ClientLine:
    """A known line, which is removed where it is the first line of the system prompt."""

    rule: str
    """Its name in the metric."""
    agent: str
    pattern: re.Pattern[str]
    """Matches all of the line."""
    reason: str
    """Why the model loses nothing."""


CLIENT_LINES: Final = (
    ClientLine(
        rule="claude-code-billing",
        agent="Claude Code",
        pattern=re.compile(r"x-anthropic-billing-header: ?[a-z_]+=[^;\s]*(; ?[a-z_]+=[^;\s]*)*;? ?"),
        reason="a header for Anthropic's accounting; its version has a suffix that differs with each first message",
    ),
)
MAX_LINE_CHARS: Final = 1024
"""Longer lines are not compared."""
_SYSTEM_ROLES: Final = ("system", "developer")


def without_client_lines(conversation: Conversation) -> tuple[Conversation, ClientLine | None]:
    """Return the conversation without the known line that begins its system prompt, and that line.

    A part of the content that becomes empty is removed too, and so is a system message.
    """
    first = conversation.messages[0] if conversation.messages else None
    if first is None or first.role not in _SYSTEM_ROLES or not first.content:
        return conversation, None
    text = first.content if isinstance(first.content, str) else first.content[0].text or ""
    for line in CLIENT_LINES:
        if (rest := _after(line, text)) is not None:
            return _with_beginning(conversation, first, rest), line
    return conversation, None


def _after(line: ClientLine, text: str) -> str | None:
    """Return what follows the line in a text that begins with it."""
    end = text.find("\n", 0, MAX_LINE_CHARS)
    if end < 0 and len(text) > MAX_LINE_CHARS:
        return None
    found, rest = (text, "") if end < 0 else (text[:end].removesuffix("\r"), text[end + 1 :])
    return rest if line.pattern.fullmatch(found) else None


def _with_beginning(conversation: Conversation, first: Message, rest: str) -> Conversation:
    """Return the conversation with another text at its beginning."""
    content: str | list[TextPart] = rest
    is_empty = not rest
    if isinstance(first.content, list):
        others = first.content[1:]
        content = [msgspec.structs.replace(first.content[0], text=rest), *others] if rest else others
        is_empty = not any(part.text or part.refusal for part in content)
    messages = conversation.messages[1:]
    if not (is_empty and messages):  # templates need a message
        return replace(conversation, messages=[msgspec.structs.replace(first, content=content), *messages])
    return replace(conversation, messages=messages, num_removed=1)
