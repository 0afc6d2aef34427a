"""Thoughts of earlier answers, in whichever form a client sends them back.

chats       `reasoning_content` or `reasoning`; `thinking_blocks` or `reasoning_details`; parts of the content
messages    blocks of the type `thinking`
responses   items of the type `reasoning`, by their content, else by their summary

All of them become the `reasoning_content` of a message. The template decides what it shows.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

PART_TYPES: Final = frozenset(
    {"thinking", "redacted_thinking", "reasoning", "reasoning_text", "reasoning_content", "summary_text"}
)
"""Types of parts that hold thoughts."""
_KEYS: Final = ("thinking", "reasoning", "reasoning_content", "reasoning_text", "text", "content", "summary")
"""Fields that hold the text of thoughts. The first that has one counts."""


def thought_text(value: Any) -> str | None:
    """Return the text of thoughts; None where there is none, as in encrypted ones."""
    if isinstance(value, str):
        return value or None
    if isinstance(value, list):
        return "\n".join(filter(None, map(thought_text, value))) or None
    if isinstance(value, Struct):
        value = {name: getattr(value, name) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return next(filter(None, (thought_text(value.get(key)) for key in _KEYS)), None)
    return None
