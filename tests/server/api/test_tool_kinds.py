"""Tools of every type, in each API: calls come back as the client named them, and what cannot run is named."""

from __future__ import annotations

import json
import logging
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from cache.types import BlockHash
from server.api.prompts.ignored_tools import IgnoredTools
from server.api.prompts.items import messages_of_items
from server.api.responses import ResponsesFormatter
from server.errors import InvalidRequestError
from server.request.choice import ChoiceDelta, GenerationSpec
from server.request_context import CURRENT, RequestContext
from server.schema.requests import ChatRequest, ResponsesRequest
from server.schema.tools import make_tool_set, read_tools
from server.text.formats import FORMATS
from server.text.output_parser import ChoiceMessage, OutputRules
from tests.server.api.engine_worker import APIS
from tests.server.api.test_tools import WEATHER, follows
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import Says
from tests.server.test_app import MESSAGES, chat, client, post, post_once
from tests.waiting import HANG_S
from worker.engine.grammar import GrammarCompiler
from worker.wire import Grammar

CITY: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: Any = {"type": "function", "name": "get_weather", "strict": False, "parameters": CITY}
PATCH_GRAMMAR = 'start: "*** Begin" /.+/ "*** End"'
CUSTOM: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
}
NAMESPACE: Any = {"type": "namespace", "name": "mcp__maps__", "description": "Maps.", "tools": [FUNCTION]}
BUILT_IN: Any = [
    {"type": "web_search", "external_web_access": False, "filters": {"allowed_domains": ["a.example"]}},
    {"type": "mcp", "server_label": "m", "tools": "all"},
    {"type": "tool_from_the_future", "function": 5, "name": ["x"]},
]
ANTHROPIC: Any = {"name": "get_weather", "input_schema": CITY}
ANTHROPIC_BUILT_IN: Any = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "mcp_toolset", "mcp_server_name": "m"},
]


def hermes(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def asked(path: str, **fields: Any) -> dict[str, Any]:
    match path:
        case "/v1/chat/completions":
            return chat(**fields)
        case "/v1/responses":
            return {"model": "tiny", "input": "x", **fields}
    return {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "x"}], **fields}


async def test_calls_of_a_namespace_and_of_custom_tools_in_responses(says: Says) -> None:
    """The answers, streamed and not, and the prompt of the next turn."""
    patch = '*** Begin\n+"é" \\ 🎉\n*** End'
    worker = says(hermes("mcp__maps__get_weather", {"city": "Köln"}) + hermes("apply_patch", {"input": patch}))
    tools = [FUNCTION, NAMESPACE, CUSTOM, *BUILT_IN[:1]]
    async with gateway(worker) as target, client(target) as sdk:
        answer = await sdk.responses.create(model="tiny", input="x", tools=tools, tool_choice="auto")
        mapped, patched = answer.output
        assert mapped.type == "function_call"
        assert (mapped.namespace, mapped.name, json.loads(mapped.arguments)) == (
            "mcp__maps__",
            "get_weather",
            {"city": "Köln"},
        )
        assert patched.type == "custom_tool_call"
        assert (patched.name, patched.input, patched.namespace) == ("apply_patch", patch, None)
        async with sdk.responses.stream(model="tiny", input="x", tools=tools) as stream:
            events = [event async for event in stream]
        deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
        (done,) = [event.input for event in events if event.type == "response.custom_tool_call_input.done"]
        assert "".join(deltas) == done == patch
        history: Any = [
            {"role": "user", "content": "x"},
            {"type": "reasoning", "summary": [], "encrypted_content": "e"},
            *(item.model_dump(exclude_none=True) for item in answer.output),
            {"type": "function_call_output", "call_id": mapped.call_id, "output": "rain"},
            {"type": "custom_tool_call_output", "call_id": patched.call_id, "output": "done"},
            {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
            {"type": "local_shell_call", "call_id": "c", "status": "completed", "action": {"command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "c", "output": "a.txt"},
        ]
        status, headers, raw = await post(
            target.url, {"model": "tiny", "input": history, "tools": tools, "stream": True}, "/v1/responses"
        )
        assert status == 200, raw
        assert headers["x-headstart-ignored"] == "web_search, web_search_call"
    prompt = says.prompt(worker)
    assert '{"name": "mcp__maps__get_weather", "arguments": {"city": "Köln"}}' in prompt
    assert f'{{"name": "apply_patch", "arguments": {{"input": {json.dumps(patch, ensure_ascii=False)}}}}}' in prompt
    assert json.dumps(PATCH_GRAMMAR)[1:-1] in prompt, "the model sees the grammar"
    assert '{"name": "local_shell", "arguments": {"command": ["ls"]}}' in prompt
    assert "a.txt" in prompt
    assert "web_search" not in prompt


async def test_custom_tools_in_chats(says: Says) -> None:
    worker = says(hermes("say", {"input": "<a>\nb"}))
    tools = [{"type": "custom", "custom": {"name": "say"}}, WEATHER]
    async with gateway(worker) as target, client(target) as sdk:
        answer = await sdk.chat.completions.create(model="tiny", messages=MESSAGES, tools=tools)  # type: ignore[call-overload]
        assert answer.choices[0].finish_reason == "tool_calls"
        (call,) = answer.choices[0].message.tool_calls
        assert (call.type, call.custom.name, call.custom.input) == ("custom", "say", "<a>\nb")
        history = [*MESSAGES, answer.choices[0].message.model_dump(exclude_none=True)]
        history.append({"role": "tool", "tool_call_id": call.id, "content": "said"})
        _, _, raw = await post(target.url, chat(messages=history, tools=tools, stream=True))
    chunks = [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: {")]
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert calls[0]["type"] == "custom"
    assert "".join(call["custom"]["input"] for call in calls) == "<a>\nb"
    assert '{"name": "say", "arguments": {"input": "<a>\\nb"}}' in says.prompt(worker)


@pytest.mark.parametrize(("syntax", "kind"), [("lark", "grammar"), ("regex", "regex")])
async def test_a_named_custom_tool_is_held_to_its_grammar(says: Says, syntax: str, kind: Any) -> None:
    worker = says("a+b")
    form = {"type": "grammar", "syntax": syntax, "definition": "a.b"}
    fields = {"tools": [{**CUSTOM, "format": form}], "tool_choice": {"type": "custom", "name": "apply_patch"}}
    _, _, raw = await post_once(gateway(worker), asked("/v1/responses", **fields), "/v1/responses")
    (item,) = json.loads(raw)["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", "a+b")
    assert worker.received[0].sampling.grammar == Grammar(kind, "a.b")


PATCH = """start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: "*** Add File: " /(.+)/ LF ("+" /(.*)/ LF)+
%import common.LF
"""


@pytest.mark.parametrize(
    ("form", "choice", "accepted", "refused"),
    [
        (
            {"syntax": "lark", "definition": PATCH},
            {"type": "custom", "name": "apply_patch"},
            "*** Begin Patch\n*** Add File: a.txt\n+x\n*** End Patch",
            "Here is",
        ),
        ({"syntax": "regex", "definition": "[a-c]+"}, {"type": "custom", "name": "apply_patch"}, "abc", "x"),
        (
            {"syntax": "regex", "definition": "[a-c]+"},
            "required",
            '[{"name": "apply_patch", "parameters": {"input": "abc"}}]',
            '[{"name": "apply_patch", "parameters": {"input": "x"}}]',
        ),
        (None, {"type": "custom", "name": "apply_patch"}, '{"input": "any"}', "any"),
    ],
)
async def test_the_grammars_compile_and_hold(says: Says, form: Any, choice: Any, accepted: str, refused: str) -> None:
    worker = says("x")
    tool = {**CUSTOM, "format": form and {"type": "grammar", **form}}
    await post_once(gateway(worker), asked("/v1/responses", tools=[tool], tool_choice=choice), "/v1/responses")
    compiler = GrammarCompiler(worker.bundle, compile_timeout_s=HANG_S)
    try:
        tokenizer = Tokenizer.from_str(worker.bundle.tokenizer_json.decode())
        for text, taken in ((accepted, True), (refused, False)):
            constraint = (await compiler.constraints(worker.received[0]))[0]
            assert follows(constraint, tokenizer.encode(text, add_special_tokens=False).ids) == taken, text
    finally:
        compiler.close()


async def test_a_named_custom_tool_without_a_grammar_and_allowed_tools(says: Says) -> None:
    worker = says('{"input": "text"}')
    tools = [{"type": "custom", "custom": {"name": "say"}}, WEATHER]
    async with gateway(worker) as target:
        choice = {"type": "custom", "custom": {"name": "say"}}
        _, _, raw = await post(target.url, chat(tools=tools, tool_choice=choice))
        (call,) = json.loads(raw)["choices"][0]["message"]["tool_calls"]
        assert call["custom"] == {"name": "say", "input": "text"}
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "apply_patch"}]}
        fields = {"tools": [FUNCTION, CUSTOM], "tool_choice": allowed}
        assert (await post(target.url, asked("/v1/responses", **fields), "/v1/responses"))[0] == 200
    assert "apply_patch" in says.prompt(worker)
    assert "get_weather" not in says.prompt(worker)


PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens")


def usable(path: str) -> Any:
    return WEATHER if path == PATHS[0] else FUNCTION if path == PATHS[1] else ANTHROPIC


def built_in(path: str) -> Any:
    return ANTHROPIC_BUILT_IN if path in PATHS[2:] else BUILT_IN


@pytest.mark.parametrize("path", PATHS)
async def test_tools_that_cannot_run_are_left_out_and_named(
    says: Says, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = says("x")
    types = ", ".join(tool["type"] for tool in built_in(path))
    free = [None, "auto", "none"] if path in PATHS[:2] else [None, {"type": "auto"}, {"type": "none"}]
    caplog.set_level(logging.WARNING)
    async with gateway(worker) as target:
        for tools in (built_in(path), [*built_in(path), usable(path)]):
            for choice in free:
                for stream in (False, True) if path in PATHS[:3] else (False,):
                    fields = {"tools": tools, "tool_choice": choice, "stream": stream}
                    status, headers, raw = await post(target.url, asked(path, **fields), path)
                    assert (status, headers.get("x-headstart-ignored")) == (200, types), (fields, raw)
                    if path in PATHS[:3]:
                        assert not any(name in says.prompt(worker) for name in types.split(", "))
        required = "required" if path in PATHS[:2] else {"type": "any"}
        fields = {"tools": [*built_in(path), usable(path)], "tool_choice": required}
        assert (await post(target.url, asked(path, **fields), path))[0] == 200, "one tool can be called"
        _, headers, _ = await post(target.url, asked(path, tools=[usable(path)]), path)
        assert "x-headstart-ignored" not in headers
    logged = [record.getMessage() for record in caplog.records if "left" in record.getMessage()]
    assert len(logged) == len(built_in(path)), "each type once"


@pytest.mark.parametrize("path", PATHS)
async def test_forced_tools_that_cannot_run_are_refused_by_name(says: Says, path: str) -> None:
    worker = says("x")
    first = built_in(path)[0]["type"]
    forced: Any = ["required", {"type": first}]
    if path in PATHS[2:]:
        forced = [{"type": "any"}, {"type": "tool", "name": "web_search"}]
    async with gateway(worker) as target:
        for choice in forced:
            status, _, raw = await post(target.url, asked(path, tools=built_in(path), tool_choice=choice), path)
            assert status == 400
            message = json.loads(raw)["error"]["message"]
            assert "tool_choice" in message
            assert first in message
    assert worker.received == []


@pytest.mark.parametrize("path", PATHS)
async def test_strict_tools_refuses_them_always(says: Says, path: str) -> None:
    worker = says("x")
    async with gateway(worker, strict_tools=True) as target:
        body = asked(path, tools=[usable(path), built_in(path)[0]])
        status, _, raw = await post(target.url, body, path)
        assert status == 400
        assert json.loads(raw)["error"]["message"].startswith(f"tools[1].type is '{built_in(path)[0]['type']}'")
        assert (await post(target.url, asked(path, tools=[usable(path)]), path))[0] == 200


async def test_tokenize_says_what_a_chat_would(says: Says) -> None:
    body = chat(tools=[WEATHER, *BUILT_IN[:1]])
    async with gateway(says("x")) as target:
        _, headers, _ = await post(target.url, body, "/tokenize")
        assert headers["x-headstart-ignored"] == "web_search"
    async with gateway(says("x"), strict_tools=True) as target:
        assert (await post(target.url, body, "/tokenize"))[0] == 400


async def test_a_history_of_another_server_in_messages(says: Says) -> None:
    worker = says("x")
    blocks = [
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"type": "web_search_result", "url": "u"}]},
        {"type": "code_execution_tool_result", "tool_use_id": "s2", "content": {"type": "code_execution_result"}},
        {"type": "mcp_tool_listing", "mcp_server_name": "s", "tools": [{"name": "f", "input_schema": {}}]},
        {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}, "trigger": None},
        {"type": "text", "text": "Found."},
    ]
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": "y"},
    ]
    status, headers, raw = await post_once(gateway(worker), asked("/v1/messages", messages=messages), "/v1/messages")
    assert status == 200, raw
    assert headers["x-headstart-ignored"] == ", ".join(block["type"] for block in blocks[:-1])
    assert "Found." in says.prompt(worker)


async def test_three_hundred_tools_with_names_of_128_characters(says: Says) -> None:
    worker = says("x", max_model_len=400_000)
    async with gateway(worker) as target:
        for path in PATHS[:3]:
            tools: Any = []
            for number in range(300):
                name = f"mcp__server__{number}".ljust(128, "x")
                if path == PATHS[0]:
                    tools.append({"type": "function", "function": {"name": name}})
                else:
                    tools.append({**usable(path), "name": name})
            status, _, raw = await post(target.url, asked(path, tools=tools, tool_choice=None), path)
            assert status == 200, raw


def test_one_name_for_two_tools_is_refused() -> None:
    same = make_tool_set(read_tools([FUNCTION, FUNCTION], nested=False))
    assert [tool.name for tool in same.tools] == ["get_weather"]
    with pytest.raises(Exception, match=r"tools\[1\].name is the name of tools\[0\] too"):
        make_tool_set(read_tools([FUNCTION, {**FUNCTION, "description": "other"}], nested=False))


WORDS = st.sampled_from(["a", "b", "a__b", "b__a", "a_b", "mcp__a__", "x" * 60, "x" * 61, "x" * 128])
DOTTED = WORDS | st.sampled_from(["a.b", "a/b", "a:b", "a-b"])


@st.composite
def mixes(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Tools of all kinds as /v1/responses has them; names that fall together once joined are likely."""
    tools: list[dict[str, Any]] = []
    taken = set()
    for _ in range(draw(st.integers(1, 6))):
        kind, name = draw(st.sampled_from(["function", "custom", "namespace", "web_search"])), draw(WORDS)
        if (kind, name) in taken:
            continue
        taken.add((kind, name))
        if kind == "namespace":
            inner = draw(st.lists(st.tuples(st.sampled_from(["function", "custom"]), DOTTED), max_size=3, unique=True))
            tools.append(
                {"type": kind, "name": name, "tools": [{"type": each, "name": named} for each, named in inner]}
            )
        else:
            tools.append({"type": kind, "name": name})
    return tools


def in_chats(tool: dict[str, Any]) -> dict[str, Any]:
    if tool["type"] == "namespace":
        return {**tool, "tools": [in_chats(inner) for inner in tool["tools"]]}
    return {"type": tool["type"], tool["type"]: {"name": tool["name"]}}


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(places)] or [""]


@given(mixes(), st.text(max_size=20), st.lists(st.integers(0, 400), max_size=6))
def test_random_mixes_round_trip(tools: list[dict[str, Any]], text: str, cuts: list[int]) -> None:
    """Every tool has a name of its own for the model. A call of it comes back as the client's, and so does history."""
    text = text.encode("utf-8", "replace").decode()
    for nested in (False, True):
        tool_set = make_tool_set(read_tools([in_chats(tool) for tool in tools] if nested else tools, nested=nested))
        names = [tool.name for tool in tool_set.tools]
        assert len(names) == len(set(names)) == len(tool_set.model_names)
        rules = OutputRules(tools=FORMATS["hermes"], tool_names=frozenset(names), client_names=tool_set.names)
        for client_name, name in tool_set.model_names.items():
            assert client_name.namespace is None or len(name) <= 64
            written = hermes(name, {"input": text})
            key, value = ("input", text) if client_name.kind == "custom" else ("arguments", json.dumps({"input": text}))
            if nested:
                call = ChoiceMessage(rules).whole(written)["tool_calls"][0]
                assert call["type"] == client_name.kind
                called = call[call["type"]]
                message, texts = ChoiceMessage(rules), pieces(written, cuts)
                deltas = [
                    delta for at, text in enumerate(texts, 1) for delta in message.deltas(text, last=at == len(texts))
                ]
                parts = [part[call["type"]] for delta in deltas for part in delta.get("tool_calls", ())]
                assert "".join(part[key] for part in parts) == value
                history = {"model": "m", "messages": [{"role": "assistant", "tool_calls": [call]}]}
                offered = [in_chats(tool) for tool in tools]
                intent = msgspec.convert({**history, "tools": offered}, ChatRequest).intent()
                function = intent.conversation.messages[0].tool_calls[0].called  # type: ignore[index]
            else:
                called = answered(rules, pieces(written, cuts))
                request = msgspec.convert({"model": "m", "input": [called], "tools": tools}, ResponsesRequest)
                (back,), _ = messages_of_items(request, tool_set)
                function = back.tool_calls[0].called  # type: ignore[index]
            assert (called["name"], called.get("namespace"), called[key]) == (
                client_name.name,
                client_name.namespace,
                value,
            )
            assert (function.name, json.loads(function.arguments)) == (name, {"input": text})


def answered(rules: OutputRules, texts: list[str]) -> dict[str, Any]:
    """Stream a model's text as /v1/responses, and return the item of its call."""
    request = ResponsesRequest(model="m", input="x", stream=True)
    model: Any = SimpleNamespace(tokenizer=SimpleNamespace(token_bytes=None))
    spec = GenerationSpec(request_id="resp_1", model=model, root=BlockHash(b""), prompt_param="input")
    formatter = ResponsesFormatter(request, spec, rules)
    events = b""
    for number, text in enumerate(texts):
        reason = "stop" if number == len(texts) - 1 else None
        delta = ChoiceDelta(choice=0, text=text, token_ids=[], entries=[], finish_reason=reason, stop_reason=None)
        events += formatter.events(None, [delta])  # type: ignore[arg-type]
    found = [json.loads(line[6:]) for line in events.decode().split("\n") if line.startswith("data: ")]
    (item,) = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    deltas = [event["delta"] for event in found if event["type"].endswith(("arguments.delta", "input.delta"))]
    assert "".join(deltas) == item.get("input", item.get("arguments"))
    return dict(item)


WEB: Any = {"tools": [{"type": "web_search", "name": "web_search"}]}


@pytest.mark.parametrize(
    ("path", "choice", "is_refused"),
    [
        (APIS[0], "required", True),
        (APIS[0], {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{}]}}, True),
        (APIS[0], {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{}]}}, False),
        (APIS[0], "auto", False),
        (APIS[2], {"type": "any"}, True),
        (APIS[2], {"type": "tool", "name": "web_search"}, True),
        (APIS[2], {"type": "auto"}, False),
        (APIS[3], {"type": "web_search"}, True),
        (APIS[3], "none", False),
    ],
)
def test_a_call_of_the_vendors_tools_alone_is_refused(path: str, choice: Any, is_refused: bool) -> None:
    body = {**WEB, "path": path, "tool_choice": choice}
    CURRENT.set(RequestContext("", 0.0))
    ignored = IgnoredTools(strict_tools=False, strict_blocks=False)
    if not is_refused:
        assert (ignored.without(body), CURRENT.get().ignored) == ({"path": path}, ["web_search"])
        return
    with pytest.raises(InvalidRequestError, match="cannot run web_search") as refused:
        ignored.without(body)
    assert refused.value.param == "tool_choice"
