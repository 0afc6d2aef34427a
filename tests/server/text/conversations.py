"""Random conversations, and their bodies in three APIs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final

from hypothesis import strategies as st

from server.api.messages import messages_intent
from server.api.prompts.items import responses_intent
from server.event_loop import run_now
from server.schema.decoding import TextLimit
from server.schema.intent import Conversation
from server.schema.messages import COUNT_TOKENS
from server.schema.requests import CHAT, RESPONSES

CHAT_PATH: Final = "/v1/chat/completions"
MESSAGES_PATH: Final = "/v1/messages"
RESPONSES_PATH: Final = "/v1/responses"
PARAMETERS: Final = {"type": "object", "properties": {"city": {"type": "string"}}}
CUT: Final = '{"city": "Os'


@dataclass(frozen=True)
class Call:
    id: str
    arguments: str = '{"city": "Oslo"}'


@dataclass(frozen=True)
class Step:
    """A message of any API."""

    role: str
    text: str = ""
    thoughts: str = ""
    calls: tuple[Call, ...] = field(default=())
    result_of: str = ""


def chat_body(steps: list[Step], *, has_tools: bool) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for step in steps:
        message: dict[str, Any] = {"role": step.role, "content": step.text}
        if step.thoughts:
            message["reasoning_content"] = step.thoughts
        if step.calls:
            calls = [{"name": "lookup", "arguments": call.arguments} for call in step.calls]
            pairs = zip(step.calls, calls, strict=True)
            message["tool_calls"] = [{"id": call.id, "type": "function", "function": each} for call, each in pairs]
        if step.result_of:
            message["tool_call_id"] = step.result_of
        messages.append(message)
    function = {"name": "lookup", "description": "Look up.", "parameters": PARAMETERS}
    tools = [{"type": "function", "function": function}] if has_tools else None
    return {"model": "tiny", "messages": messages, "tools": tools}


def messages_body(steps: list[Step], *, has_tools: bool) -> dict[str, Any]:
    """Messages of a developer are those of the system here."""
    messages: list[dict[str, Any]] = []
    for step in steps:
        content: list[dict[str, Any]] = []
        if step.thoughts:
            content.append({"type": "thinking", "thinking": step.thoughts, "signature": "s"})
        if step.result_of:
            content.append({"type": "tool_result", "tool_use_id": step.result_of, "content": step.text})
        elif step.text or step.role != "assistant":
            content.append({"type": "text", "text": step.text})
        for call in step.calls:
            given = json.loads(call.arguments) if call.arguments != CUT else {"INVALID_JSON": CUT}
            content.append({"type": "tool_use", "id": call.id, "name": "lookup", "input": given})
        role = {"tool": "user", "developer": "system"}.get(step.role, step.role)
        messages.append({"role": role, "content": content})
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "messages": messages}
    if len(messages) > 1 and messages[0]["role"] == "system":
        body |= {"system": messages[0]["content"], "messages": messages[1:]}
    tool = {"name": "lookup", "description": "Look up.", "input_schema": PARAMETERS}
    return body | ({"tools": [tool]} if has_tools else {})


def responses_body(steps: list[Step], *, has_tools: bool) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for step in steps:
        if step.thoughts:
            items.append({"type": "reasoning", "summary": [{"type": "summary_text", "text": step.thoughts}]})
        if step.result_of:
            items.append({"type": "function_call_output", "call_id": step.result_of, "output": step.text})
        elif step.text or not (step.calls or step.thoughts):
            kind = "output_text" if step.role == "assistant" else "input_text"
            items.append({"type": "message", "role": step.role, "content": [{"type": kind, "text": step.text}]})
        for call in step.calls:
            given = {"call_id": call.id, "name": "lookup", "arguments": call.arguments}
            items.append({"type": "function_call", **given})
    tool = {"type": "function", "name": "lookup", "description": "Look up.", "parameters": PARAMETERS}
    return {"model": "tiny", "input": items, "tools": [tool] if has_tools else None}


BODIES: Final = {CHAT_PATH: chat_body, MESSAGES_PATH: messages_body, RESPONSES_PATH: responses_body}


def conversation(path: str, steps: list[Step], *, has_tools: bool) -> Conversation:
    """Return the conversation that a route makes of its body."""
    raw = json.dumps(BODIES[path](steps, has_tools=has_tools)).encode()
    return run_now(read(path, raw).__await__())


async def read(path: str, raw: bytes) -> Conversation:
    """Return the conversation of a body."""
    if path == CHAT_PATH:
        return (await CHAT.read(raw, TextLimit)).intent().conversation
    if path == RESPONSES_PATH:
        return responses_intent(await RESPONSES.read(raw, TextLimit)).conversation
    return (await messages_intent(await COUNT_TOKENS.read(raw, TextLimit))).conversation


WORDS: Final = st.text(st.sampled_from('abc é<{"\\\n'), min_size=1, max_size=12).map(lambda text: f"w{text}w")


@st.composite
def usual(draw: st.DrawFn) -> list[list[Step]]:
    """A conversation without a shape that templates refuse, as the requests of a client: each is longer."""
    steps = [Step("system", draw(WORDS))] if draw(st.booleans()) else []
    requests: list[list[Step]] = []
    number = 0
    for _ in range(draw(st.integers(1, 4))):
        steps = [*steps, Step("user", draw(WORDS))]
        requests.append(steps)
        for _ in range(draw(st.integers(0, 2))):
            call = Call(f"call{number:05d}", draw(st.sampled_from(['{"city": "Oslo"}', "{}", '{"n": [1, null]}'])))
            thoughts = draw(st.sampled_from(["", "hm", "so so"]))
            text = "" if thoughts else draw(st.sampled_from(["", "let me see"]))
            steps = [*steps, Step("assistant", text, thoughts, (call,)), Step("tool", draw(WORDS), result_of=call.id)]
            requests.append(steps)
            number += 1
        steps = [*steps, Step("assistant", draw(WORDS), draw(st.sampled_from(["", "hm"])))]
    return requests


@st.composite
def strange(draw: st.DrawFn) -> list[list[Step]]:
    """Any messages in any order, as the requests of a client: each is longer."""
    steps: list[Step] = []
    requests: list[list[Step]] = []
    ids = ["call99999"]
    for number in range(draw(st.integers(1, 9))):
        role = draw(st.sampled_from(["system", "developer", "user", "user", "assistant", "call", "tool"]))
        text = draw(st.one_of(WORDS, st.just("")))
        if role == "call":
            ids = [f"call{number:05d}"]
            arguments = draw(st.sampled_from(['{"city": "Oslo"}', "{}", CUT, "[1]", "null"]))
            steps = [*steps, Step("assistant", text, draw(st.sampled_from(["", "hm"])), (Call(ids[0], arguments),))]
        elif role == "tool":
            steps = [*steps, Step("tool", text, result_of=draw(st.sampled_from([*ids, "call88888"])))]
        else:
            steps = [*steps, Step(role, text)]
        if role == "tool" and requests and requests[-1] == steps[:-1] and requests[-1][-1].role == "tool":
            requests.pop()  # templates write the results of one turn together
        if steps[-1].role != "assistant" and any(step.role == "user" for step in steps):
            requests.append(steps)
    return requests
