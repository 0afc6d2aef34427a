"""Fields that lead a model of random weights: to a few plain words, or to the call of one tool with short arguments."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final

from tests import smollm2

Body = dict[str, Any]
_LINE: Final = "the of and a to in is that it for was on are with as this by be at from or an"
_WORDS: Final = _LINE.split()


def lead(forced: str | None = None) -> Callable[[str, Body], Body]:
    """Return what a recorder adds to bodies: `forced` is called once, after each message of the user."""
    encode = smollm2.tokenizer().encode
    words = sorted({encode(f" {word}").ids[0] for word in _WORDS} | {2})
    ends = {str(encode(text).ids[0]): 11 for text in ('"', '"}', '",', "}", ",", "]")}
    ends[str(encode("<tool_call>").ids[1])] = 11  # thoughts before the call would not end

    def change(path: str, body: Body) -> Body:
        led = {**body, "temperature": 1.0, "seed": len(str(body))}
        if forced is not None and forced in tool_names(body) and _last_is_user(body):
            choice: Any = {"type": "function", "function": {"name": forced}}
            if path.endswith("/responses"):
                choice = {"type": "function", "name": forced}
            elif path.endswith("/messages"):
                choice = {"type": "tool", "name": forced}
            return {**led, "tool_choice": choice, "logit_bias": ends}
        return {**led, "allowed_token_ids": words, "min_tokens": 1}  # Qwen Code fails at an empty answer

    return change


def tool_names(body: Body) -> Collection[str]:
    return [(tool.get("function") or tool).get("name") for tool in body.get("tools") or ()]


def _last_is_user(body: Body) -> bool:
    last = (body.get("messages") or body.get("input"))[-1]
    if last.get("role") == "system":  # Claude Code's own, behind the user's
        last = body["messages"][-2]
    content = last.get("content")
    parts = content if isinstance(content, list) else ()
    return last.get("role") == "user" and not any(part.get("type") == "tool_result" for part in parts)
