"""How model families write tool calls, and the prompt for a model whose template knows no tools.

hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call> ...          Qwen, Hermes, SmolLM3
llama3   {"name": ..., "parameters": {...}}; ...  alone, or behind <|python_tag|>
mistral  [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]  or  [TOOL_CALLS]name[ARGS]{...} ...
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, Literal

ToolFormat = Literal["hermes", "llama3", "mistral"]
MARKERS: Final[dict[ToolFormat, tuple[str, ...]]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
}
"""Texts the parser must see even where they are special tokens of the vocabulary."""
_INSTRUCTION: Final = """You can call functions to answer the user. They are, one JSON schema a line:
<tools>
{tools}
</tools>
To call a function, write a JSON object with its name and arguments between tags, and nothing else:
<tool_call>
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def format_of(template: str) -> ToolFormat | None:
    """Return the format that a chat template mentions, if any."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or ("ipython" in template and "parameters" in template):
        return "llama3"
    return "hermes" if "<tool_call>" in template else None


def with_tools(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write tools into the system message, and calls and results as text, for a template that knows no tools.

    The answer is read as `hermes`.
    """
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    instruction = _INSTRUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{instruction}"}, *plain[1:]]
    return [{"role": "system", "content": instruction}, *plain]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
    content = "\n".join(part for part in (message["content"], *written) if part)
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}
