"""Conversations that an engine and a gateway both render, by shape. Equal token ids mean equal templates.

The adapter sends them to its engine at the start, and gateways compare their own digests with the adapter's. A gateway
renders a body that has only shapes with equal digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

_Body = dict[str, Any]

_PARAMETERS: Final = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Größe <b>"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
}
_FUNCTION: Final = {"name": "get_weather", "description": 'The "weather" of a city.', "parameters": _PARAMETERS}
_SECOND: Final = {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}
_BARE: Final = (
    *({"name": "now"}, {"name": "a", "description": "An a."}, {"name": "b", "parameters": _PARAMETERS}),
    *(
        {"name": "c", "description": "", "parameters": _PARAMETERS},
        {"name": "d", "description": "D.", "parameters": {}},
    ),
)
_USER: Final = {"role": "user", "content": "  What is 1 + 1?\n\n"}
_SYSTEM: Final = {"role": "system", "content": "Be brief."}
_LONG: Final = "Größe: naïve, 日本語, 🙂🙃\n\tdef f(x):\r\n\t\treturn {'a': x ** 2}  # 100_000 & <i>"
_THANKS: Final = {"role": "user", "content": "Thanks"}
_PLAIN: Final = (_SYSTEM, _USER, {"role": "assistant", "content": "2"}, {"role": "user", "content": _LONG})
_RESULT: Final = {"role": "tool", "tool_call_id": "call00001", "content": '{"sun": true}'}


def _tools(*functions: _Body, **fields: Any) -> _Body:
    return {"tools": [{"type": "function", "function": function} for function in functions]} | fields


def _called(arguments: str, content: str | None = None, *more: _Body) -> _Body:
    """Return the assistant's turn with a call, and `more` calls."""
    first = {"name": "get_weather", "arguments": arguments}
    numbered = enumerate((first, *more), 1)
    calls = [{"id": f"call0000{number}", "type": "function", "function": call} for number, call in numbered]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _of_parts(message: _Body) -> _Body:
    """Return a message whose content has two parts."""
    parts = [{"type": "text", "text": message["content"] or ""}, {"type": "text", "text": "and more"}]
    return message | {"content": parts}


def _both(name: str, *conversations: Sequence[_Body], **fields: Any) -> dict[str, tuple[_Body, ...]]:
    """Return the shape of these conversations, and that of the same with tools."""
    bodies = tuple([{"messages": list(messages)} | fields for messages in conversations])
    return {name: bodies, name + WITH_TOOLS: tuple([body | _tools(_FUNCTION, _SECOND) for body in bodies])}


_ARGUMENTS: Final = '{"city": "Zürich", "days": 2, "units": [1.5, null, true], "of": {"a": "<&>"}}'
_CALL: Final = (_USER, _called(_ARGUMENTS), _RESULT)
_CALLS: Final = (_USER, _called(_ARGUMENTS, " I look. ", {"name": "now", "arguments": "{}"}), _RESULT)
_EMPTY: Final = {"content": ""}
_NO_PARTS: Final = (_of_parts(_USER | _EMPTY), _called(_ARGUMENTS), _of_parts(_RESULT | _EMPTY))
WITH_TOOLS: Final = "+tools"
"""The end of the name of a shape whose bodies also have tools."""

CHAT_PROBES: Final[Mapping[str, tuple[_Body, ...]]] = {
    **_both("plain", (_USER,), _PLAIN, (_USER, {"role": "assistant", "content": " 2\n"}, _THANKS)),
    **_both("parts", (_of_parts(_USER),), tuple(map(_of_parts, _PLAIN)), (_SYSTEM, _of_parts(_USER))),
    **_both("empty", *[(*_PLAIN[:at], _PLAIN[at] | _EMPTY, *_PLAIN[at + 1 :]) for at in range(len(_PLAIN))], _NO_PARTS),
    **_both("parts_calls", tuple(map(_of_parts, _CALLS)), (_USER, _called(_ARGUMENTS), _of_parts(_RESULT))),
    **_both("named", *[[each | {"name": "Ada"} for each in chat] for chat in ((_USER,), (_SYSTEM, *_CALL, _THANKS))]),
    "bare": tuple([{"messages": [_USER]} | _tools(each) for each in _BARE]),
    "strict": ({"messages": [_USER]} | _tools(_FUNCTION | {"strict": True}),),
    **_both("calls", _CALL, _CALLS, (*_CALL, {"role": "assistant", "content": " It is sunny.\n"}, _THANKS)),
    **_both("broken", *[(_USER, _called(text), _RESULT) for text in ('{"city": "Zü', "[1]", "", "7")]),
    "no_call": ({"messages": list(_PLAIN)} | _tools(_FUNCTION, tool_choice="none"),),
    "forced_call": tuple(
        [
            {"messages": list(_PLAIN)} | _tools(_FUNCTION, _SECOND, tool_choice=choice)
            for choice in ("required", {"type": "function", "function": {"name": "now"}})
        ]
    ),
    **_both("thinks", (_USER,), _PLAIN, chat_template_kwargs={"enable_thinking": True}),
    **_both("thinks_not", (_USER,), _PLAIN, chat_template_kwargs={"enable_thinking": False}),
} | {
    name: bodies
    for effort in ("none", "minimal", "low", "medium", "high")
    for name, bodies in _both(f"effort_{effort}", (_USER,), _PLAIN, reasoning_effort=effort).items()
}
"""By shape."""
BLACK_PNG: Final = (
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAAAAACPAi4CAAAAG0lEQVR42u3BgQAAAADDoPlT3+AEVQEAAAB8AxBAAAG9PLePAAAAAElFTkSuQmCC"
)
"""An image in base64, to find out whether an engine takes any: some models take none below 64 by 64 pixels."""


def digests(prompts: Mapping[str, Sequence[Sequence[int] | None]]) -> tuple[tuple[str, str], ...]:
    """Return a digest of the token ids of each shape. None: a refusal; a shape that is always refused has no digest."""
    found = {name: repr([None if ids is None else list(ids) for ids in each]) for name, each in prompts.items()}
    known = [(name, ids) for name, ids in found.items() if any(prompts[name])]
    return tuple([(name, hashlib.sha256(ids.encode()).hexdigest()[:16]) for name, ids in known])
