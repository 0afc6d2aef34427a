"""The grammar of Anthropic's streams, messages and errors, checked on the raw bytes.

stream := ping* message_start (ping | block)* message_delta message_stop
block  := content_block_start content_block_delta* content_block_stop
event  := "event: " TYPE "\\ndata: " JSON "\\n\\n"
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

DELTAS = {
    "text": {"text_delta": "text"},
    "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
    "tool_use": {"input_json_delta": "partial_json"},
}
STARTS = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}
STOP_REASONS = {"end_turn", "max_tokens", "stop_sequence", "tool_use"}


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """The JSON of every event, whose name is its type."""
    assert raw.endswith(b"\n\n"), f"the stream ends within an event: {raw[-80:]!r}"
    events = []
    for block in raw.decode()[:-2].split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def read_stream(raw: bytes) -> dict[str, Any]:
    """The message that a whole stream spells."""
    events = [event for event in events_of(raw) if event != {"type": "ping"}]
    start, *blocks, delta, stop = events
    assert (start["type"], delta["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message: dict[str, Any] = start["message"]
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    content = message["content"]
    pieces: list[str] | None = None
    for event in blocks:
        match event["type"]:
            case "content_block_start":
                assert pieces is None, "one block at a time"
                assert event["index"] == len(content)
                block, pieces = event["content_block"], []
                assert STARTS[block["type"]].items() <= block.items()
                content.append(block)
            case "content_block_delta":
                assert event["index"] == len(content) - 1
                assert pieces is not None, "within a block"
                name = DELTAS[block["type"]][event["delta"]["type"]]
                if name == "partial_json":
                    pieces.append(event["delta"][name])
                else:
                    block[name] += event["delta"][name]
            case "content_block_stop":
                assert event == {"type": "content_block_stop", "index": len(content) - 1}
                assert pieces is not None, "within a block"
                if pieces:
                    block["input"] = json.loads("".join(pieces))
                pieces = None
            case kind:
                raise AssertionError(f"no event of a stream: {kind}")
    assert pieces is None, "every block ends"
    message |= delta["delta"]
    message["usage"] |= delta["usage"]
    return check_message(message)


def check_message(message: dict[str, Any]) -> dict[str, Any]:
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert message["id"].startswith("msg_")
    assert message["stop_reason"] in STOP_REASONS
    assert (message["stop_reason"] == "stop_sequence") == (message["stop_sequence"] is not None)
    assert all(STARTS[block["type"]].keys() <= block.keys() for block in message["content"])
    usage = message["usage"]
    assert min(usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) >= 0
    return message


def check_error(raw: bytes, headers: Mapping[str, str]) -> dict[str, Any]:
    """The `error` of an unstreamed error."""
    body = json.loads(raw)
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert set(body["error"]) - {"details"} == {"type", "message"}
    assert body["error"]["message"]
    assert body["request_id"] == headers["request-id"]
    error: dict[str, Any] = body["error"]
    return error
