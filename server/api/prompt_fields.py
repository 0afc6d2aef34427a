"""The class of field that a prompt's block comes from. It is searched when conversations part at a new place."""

from __future__ import annotations

import json
from typing import Final

import msgspec

from server.request.choice import GenerationSpec
from server.schema.intent import Conversation
from server.text.template_input import message_text

MAX_SEARCHED_CHARS: Final = 1 << 18
_WINDOW_CHARS: Final = 12
_STEP_CHARS: Final = 4
_SYSTEM_ROLES: Final = frozenset({"system", "developer"})


def field_at(conversation: Conversation | None, spec: GenerationSpec, token: int) -> str:
    """Return the class of the field that a prompt's block at `token` comes from; "" if none has its text."""
    if conversation is None:
        return "prompt"
    decode, ids, size = spec.model.tokenizer.decode, spec.prompt_ids, spec.model.bundle.block_size
    block, behind = (_squeezed(decode(ids[at : at + size])) for at in (token, token + size))
    texts = _texts_by_field(conversation)
    # The field that begins last in the block is the one that changes; those before it end there.
    ends = [*range(len(block), _WINDOW_CHARS - 1, -_STEP_CHARS)]
    windows = [block[end - _WINDOW_CHARS : end] for end in ends]
    for window in (*windows, block[:_WINDOW_CHARS], behind[-_WINDOW_CHARS:]):
        for name, text in texts.items():
            if len(window) == _WINDOW_CHARS and window in text:
                return name
    short = (_squeezed(message_text(m.content)) for m in conversation.messages if m.role not in _SYSTEM_ROLES)
    return "messages" if any(text[:_WINDOW_CHARS] in block for text in short if text) else ""


def _texts_by_field(conversation: Conversation) -> dict[str, str]:
    """Return the texts without white space, which templates change."""
    parts: dict[str, list[str]] = {"system": [], "tools": [], "messages": []}
    room = dict.fromkeys(parts, MAX_SEARCHED_CHARS)
    for message in conversation.messages:
        _add(parts, room, "system" if message.role in _SYSTEM_ROLES else "messages", message_text(message.content))
        if not (room["system"] or room["messages"]):
            break
    for tool in conversation.tools:
        if not room["tools"]:
            break
        written = json.dumps({"name": tool.name, **msgspec.to_builtins(tool.function)}, ensure_ascii=False)
        _add(parts, room, "tools", written)
    return {name: _squeezed("\0".join(texts)) for name, texts in parts.items()}


def _add(parts: dict[str, list[str]], room: dict[str, int], name: str, text: str) -> None:
    parts[name].append(text[: room[name]])
    room[name] -= len(parts[name][-1])


def _squeezed(text: str) -> str:
    return "".join(text.replace("\ufffd", "").split())
