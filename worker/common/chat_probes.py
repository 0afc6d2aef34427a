"""Conversations that an engine and a gateway both render. Equal ids mean equal templates.

The adapter sends them to its engine at the start, and gateways compare their own digest with the adapter's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

_PARAMETERS: Final = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Größe <b>"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
}
_FUNCTION: Final = {"name": "get_weather", "description": 'The "weather" of a city.', "parameters": _PARAMETERS}
_TOOLS: Final = {"tools": [{"type": "function", "function": _FUNCTION}]}
_CALL: Final = {"name": "get_weather", "arguments": '{"city": "Zürich", "days": 2, "units": [1.5, null, true]}'}
_USER: Final = {"role": "user", "content": "  What is 1 + 1?\n\n"}
_ASKED: Final = (
    {"role": "system", "content": "Be brief."},
    _USER,
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "Größe: naïve, 日本語, 🙂🙃\n\tdef f(x):\r\n\t\treturn {'a': x ** 2}  # 100_000 & <i>"},
)
_CALLED: Final = (
    _USER,
    {"role": "assistant", "content": None, "tool_calls": [{"id": "call00001", "type": "function", "function": _CALL}]},
    {"role": "tool", "tool_call_id": "call00001", "content": '{"sun": true}'},
    {"role": "assistant", "content": " It is sunny.\n"},
    {"role": "user", "content": "Thanks"},
)
CHAT_PROBES: Final[tuple[dict[str, Any], ...]] = tuple(
    {"messages": list(messages)} | tools | thinking
    for messages in ((_USER,), _ASKED, _CALLED, _CALLED[:3])
    for tools in ({}, _TOOLS)
    for thinking in ({}, *({"chat_template_kwargs": {"enable_thinking": each}} for each in (True, False)))
)


def probes_digest(prompts: Sequence[Sequence[int] | None]) -> str:
    """Return a digest of the ids of `CHAT_PROBES`; None stands for a refusal. Empty if all are refused."""
    if not any(prompts):
        return ""
    ids = [None if prompt is None else list(prompt) for prompt in prompts]
    return hashlib.sha256(repr(ids).encode()).hexdigest()[:16]
