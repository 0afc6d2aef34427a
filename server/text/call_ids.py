"""The ids of calls in a prompt, for models that write them: Kimi K2 names the function of a call in its id only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def writes_ids(template: str) -> bool:
    return "<|tool_call_argument_begin|>" in template


def number_calls(messages: Sequence[dict[str, Any]]) -> None:
    """Give each call the id that the model writes, `functions.NAME:NUMBER`, and each result the id of its call.

    Clients return the ids that the gateway made, or those of another server.
    """
    ids: dict[str, str] = {}
    number = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            ids[call["id"]] = f"functions.{call['function']['name']}:{number}"
            call["id"] = ids[call["id"]]
            number += 1
        if (id_ := message.get("tool_call_id")) in ids:
            message["tool_call_id"] = ids[id_]
