"""Tools for models whose template knows none: told in the system message, in the format that most models have met.

The answer is read by the `hermes` parser.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

_INSTRUCTION: Final = """You can call functions to answer the user. They are, one JSON schema a line:
<tools>
{tools}
</tools>
To call a function, write a JSON object with its name and arguments between tags, and nothing else:
<tool_call>
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def with_tools(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation in roles and contents alone: calls and their results become text."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    told = _INSTRUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{told}"}, *plain[1:]]
    return [{"role": "system", "content": told}, *plain]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
    content = "\n".join(part for part in (message["content"], *written) if part)
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}
