"""Tools and reasoning over the API, with the openai client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.server.gateway_app import gateway
from tests.server.scripted_worker import Refuse, Says, script_of
from tests.server.sse_grammar import check_chat, events
from tests.server.test_app import MESSAGES, chat, client, post, post_once
from tests.waiting import HANG_S
from worker.engine.grammar import GrammarCompiler, GrammarConstraint
from worker.wire import Grammar

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = 'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


async def test_a_call_streamed_and_unstreamed(says: Says) -> None:
    worker = says(CALL)
    async with gateway(worker) as target, client(target) as sdk:
        answer = await sdk.chat.completions.create(model="tiny", messages=MESSAGES, tools=[WEATHER])
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Köln"})
        async with sdk.chat.completions.stream(model="tiny", messages=MESSAGES, tools=[WEATHER]) as stream:
            final = await stream.get_final_completion()
        message = final.choices[0].message
        assert message.content == "Let me see."
        (streamed,) = message.tool_calls or []
        assert streamed.function.name == "get_weather"
        assert json.loads(streamed.function.arguments) == {"city": "Köln"}
        assert final.choices[0].finish_reason == "tool_calls"
        _, _, raw = await post(target.url, chat(tools=[WEATHER], stream=True))
        assert check_chat(raw) == ["Let me see."]
    assert '"name": "get_weather"' in says.prompt(worker), "a template without tools gets them as text"


@pytest.mark.parametrize(
    ("text", "choice", "content"),
    [
        (CALL, "auto", "Let me see."),
        ('[{"name": "get_weather", "parameters": {"city": "Berlin is a big city"}}]', "required", None),
    ],
)
async def test_a_call_that_was_cut_off_has_ended_by_its_length(
    says: Says, text: str, choice: str, content: str | None
) -> None:
    worker = says(text)
    fields = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": len(worker.reply) - 5}
    async with gateway(worker) as target:
        _, _, body = await post(target.url, chat(**fields))
        _, _, raw = await post(target.url, chat(**fields, stream=True))
    (cut,) = json.loads(body)["choices"]
    assert cut["message"]["content"] == content
    assert cut["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert cut["finish_reason"] == "length"
    assert [c["finish_reason"] for e in events(raw)[:-1] for c in e["choices"] if c["finish_reason"]] == ["length"]


@pytest.mark.parametrize(("stop", "is_cut"), [("öln", True), ('arguments": ', True), ("</tool_call>", False)])
async def test_a_call_that_a_stop_string_cuts_is_not_to_run(says: Says, stop: str, is_cut: bool) -> None:
    async with gateway(says(CALL)) as target:
        _, _, body = await post(target.url, chat(tools=[WEATHER], stop=[stop]))
        _, _, raw = await post(target.url, chat(tools=[WEATHER], stop=[stop], stream=True))
        asked = {"model": "tiny", "input": "Hi", "tools": [{"type": "function", **WEATHER["function"]}], "stop": stop}
        _, _, response = await post(target.url, asked, "/v1/responses")
        tool = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
        asked = {"model": "tiny", "messages": MESSAGES, "tools": [tool], "stop_sequences": [stop], "max_tokens": 99}
        _, _, message = await post(target.url, asked, "/v1/messages")
    reason = "stop" if is_cut else "tool_calls"
    assert json.loads(body)["choices"][0]["finish_reason"] == reason
    assert [c["finish_reason"] for e in events(raw)[:-1] for c in e["choices"] if c["finish_reason"]] == [reason]
    assert json.loads(response)["output"][-1]["status"] == ("incomplete" if is_cut else "completed")
    assert ("INVALID_JSON" in json.loads(message)["content"][-1]["input"]) == is_cut


@pytest.mark.parametrize(("parallel", "most"), [(True, None), (False, 1)])
async def test_how_many_calls_may_be_required(says: Says, parallel: bool, most: int | None) -> None:
    worker = says("[]")
    fields = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": parallel}
    assert (await post_once(gateway(worker), chat(**fields)))[0] == 200
    grammar = worker.received[0].sampling.grammar
    assert grammar is not None
    schema = json.loads(grammar.text)
    assert (schema["minItems"], schema.get("maxItems")) == (1, most)


async def test_results_go_back_into_the_prompt(says: Says) -> None:
    worker = says("It rains.")
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    status, _, raw = await post_once(gateway(worker), chat(messages=messages, tools=[WEATHER]))
    assert status == 200, raw
    prompt = says.prompt(worker)
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>' in prompt
    assert "<tool_response>\nrain\n</tool_response>" in prompt


async def test_required_holds_the_model_to_a_list_of_calls(says: Says) -> None:
    worker = says('[{"name": "get_weather", "parameters": {"city": "Bonn"}}]')
    async with gateway(worker) as target:
        for stream in (False, True):
            status, _, raw = await post(target.url, chat(tools=[WEATHER], tool_choice="required", stream=stream))
            assert status == 200
            assert b'"finish_reason":"tool_calls"' in raw
            assert b'"name":"get_weather"' in raw
    grammar = worker.received[0].sampling.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"
    schema = json.loads(grammar.text)
    assert (schema["type"], schema["minItems"]) == ("array", 1)


async def test_a_named_function_gets_its_arguments(says: Says) -> None:
    worker = says('{"city": "Bonn"}')
    named = {"type": "function", "function": {"name": "get_weather"}}
    _, _, raw = await post_once(gateway(worker), chat(tools=[WEATHER], tool_choice=named))
    choice = json.loads(raw)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Bonn"}'}
    assert worker.received[0].sampling.grammar == Grammar(
        "json_schema", json.dumps(WEATHER["function"]["parameters"] | {"x-guidance": {"lenient": True}})
    )


async def test_tool_choice_none_leaves_text_alone(says: Says) -> None:
    """The prompt has the tools all the same: it keeps the prefix of the turns before."""
    worker = says(CALL)
    _, _, raw = await post_once(gateway(worker), chat(tools=[WEATHER], tool_choice="none"))
    assert json.loads(raw)["choices"][0]["message"]["content"] == CALL
    shown = says.prompt(worker)
    await post_once(gateway(worker), chat(tools=[WEATHER]))
    assert "get_weather" in shown == says.prompt(worker)


async def test_reasoning_is_split_from_the_answer(says: Says) -> None:
    worker = says("<think>Well, 4.</think>\n\nIt is 4.", chat_template="{{ messages[0].content }}{# <think> #}")
    async with gateway(worker) as target:
        _, _, body = await post(target.url, chat())
        _, _, raw = await post(target.url, chat(stream=True))
    message = json.loads(body)["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("It is 4.", "Well, 4.")
    assert check_chat(raw) == ["It is 4."]
    opened = says("Well, 4.</think>It is 4.", chat_template="{{ messages[0].content }}<think>\n")
    _, _, begun = await post_once(gateway(opened), chat())
    message = json.loads(begun)["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("It is 4.", "Well, 4."), "the prompt has opened them"
    thoughts = says("<think>Well, 4.</think>").reply
    assert json.loads(body)["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(thoughts)


async def test_reasoning_that_several_tokens_end_is_counted(says: Says) -> None:
    """The last of them may hold the beginning of the answer, which may have them again."""
    thoughts = "Here is my thought process: Well, 4. Here is my response:"
    whole = thoughts + " 4. Here is my response: 5."
    worker = says(whole, chat_template="{{ messages[0].content }}{# Here is my thought process: #}")
    _, _, raw = await post_once(gateway(worker), chat())
    num_tokens = json.loads(raw)["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert num_tokens in (len(says(thoughts).reply), len(says(thoughts).reply) + 1)


@pytest.mark.parametrize("is_begun", [False, True])
async def test_an_answer_cut_within_its_thoughts_is_reasoning(says: Says, is_begun: bool) -> None:
    opening = "<think>\n" if is_begun else "{# <think> #}"
    worker = says("Well, 4." if is_begun else "<think>Well, 4.", chat_template="{{ messages[0].content }}" + opening)
    async with gateway(worker) as target:
        _, _, raw = await post(target.url, chat())
        usage = json.loads(raw)["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] == usage["completion_tokens"] > 0
        _, _, raw = await post(target.url, {**chat(), "max_tokens": 50}, "/v1/messages")
        usage = json.loads(raw)["usage"]
        assert usage["output_tokens_details"]["thinking_tokens"] == usage["output_tokens"] > 0


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "json_object"}}, Grammar("json_object", "")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
            Grammar("json_schema", '{"type":"object","x-guidance":{"lenient":true}}'),
        ),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar("choice", '["a","b"]')),
        ({"structured_outputs": {"grammar": "root ::= x"}}, Grammar("grammar", "root ::= x")),
        (
            {"structured_outputs": {"json": {"type": "string"}}},
            Grammar("json_schema", '{"type":"string","x-guidance":{"lenient":true}}'),
        ),
        ({"response_format": {"type": "text"}}, None),
    ],
)
async def test_structured_output_reaches_the_worker(
    says: Says, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    worker = says("{}")
    status, _, raw = await post_once(gateway(worker), chat(**fields))
    assert status == 200, raw
    assert worker.received[0].sampling.grammar == grammar


OTHER: Any = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}


async def test_the_model_sees_the_allowed_tools_alone(says: Says) -> None:
    worker = says(CALL)
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    async with gateway(worker) as target:
        status, _, raw = await post(target.url, chat(tools=[OTHER, WEATHER], tool_choice=choice))
        assert status == 200, raw
        assert worker.received[-1].sampling.grammar is None
        allowed["mode"] = "required"
        await post(target.url, chat(tools=[OTHER, WEATHER], tool_choice=choice))
        allowed["tools"] = [{"type": "function", "function": {"name": "none"}}]
        status, _, raw = await post(target.url, chat(tools=[OTHER, WEATHER], tool_choice=choice))
    assert (status, json.loads(raw)["error"]["param"]) == (400, "tool_choice")
    assert '"name": "other"' not in says.prompt(worker)
    grammar = worker.received[-1].sampling.grammar
    assert grammar is not None
    assert [call["properties"]["name"]["const"] for call in json.loads(grammar.text)["items"]["anyOf"]] == [
        "get_weather"
    ]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("template", "call"),
    [
        ("{# tools <tool_call> #}x", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "K"}}\n</tool_call>'),
        ("{# tools <|python_tag|> #}x", '{"name": "get_weather", "parameters": {"city": "K"}}'),
        ("{# tools [TOOL_CALLS] #}x", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "K"}}]'),
    ],
)
async def test_a_format_with_tools_leaves_calls_possible(says: Says, template: str, call: str) -> None:
    """The grammar takes the answer, and a call in the family's own form, and nothing else."""
    worker = says('{"a": 1}', chat_template=template)
    async with gateway(worker) as target:
        status, _, raw = await post(target.url, chat(tools=[WEATHER], response_format=FORMAT))
        assert json.loads(raw)["choices"][0]["message"]["content"] == '{"a": 1}'
    assert status == 200
    request = worker.received[0]
    compiler = GrammarCompiler(worker.bundle, compile_timeout_s=HANG_S)
    try:
        tokenizer = Tokenizer.from_str(worker.bundle.tokenizer_json.decode())
        for text, taken in (('{"a": 1}', True), (call, True), ("hello", False), ('{"b": 1}', False)):
            constraint = (await compiler.constraints(request))[0]
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            assert follows(constraint, ids) == taken, text
    finally:
        compiler.close()


def follows(constraint: GrammarConstraint, token_ids: list[int]) -> bool:
    for token_id in token_ids:
        mask: Any = constraint.allowed()
        if not (int(mask[token_id // 32]) >> (token_id % 32)) & 1:
            return False
        constraint.advance(token_id)
    return True


async def test_structured_outputs_with_tools_are_refused(says: Says) -> None:
    async with gateway(says("x")) as target:
        body = chat(tools=[WEATHER], structured_outputs={"regex": "a"})
        status, _, raw = await post(target.url, body)
        assert (status, json.loads(raw)["error"]["param"]) == (400, "structured_outputs")
        status, _, _ = await post(target.url, {**body, "tool_choice": "none"})
        assert status == 200


async def test_a_format_leaves_no_room_for_reasoning(says: Says) -> None:
    """A template that opens the thoughts, and a grammar that allows none: the text is the answer."""
    worker = says('{"a": 1}', chat_template="{{ messages[0].content }}<think>")
    _, _, raw = await post_once(gateway(worker), chat(response_format=FORMAT))
    assert json.loads(raw)["choices"][0]["message"]["content"] == '{"a": 1}'


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "response_format": FORMAT}, "response_format"),
        ("/v1/chat/completions", {"messages": MESSAGES, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": [WEATHER], "tool_choice": "required"}, "tools"),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_object"}}}, "text.format"),
    ],
)
async def test_a_grammar_that_no_worker_compiles_names_its_field(
    says: Says, path: str, fields: dict[str, Any], param: str
) -> None:
    worker = says("x")
    worker.behave = script_of(then=Refuse(400, "invalid_grammar", retryable=False))
    async with gateway(worker) as target:
        for stream in (False, True):
            status, _, raw = await post(target.url, {"model": "tiny", "stream": stream, **fields}, path)
            assert (status, json.loads(raw)["error"]["param"]) == (400, param)
