"""Tools and reasoning over the API, with the openai client."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.server.gateway_app import gateway
from tests.server.scripted_worker import ScriptedWorker
from tests.server.sse_grammar import check_chat
from tests.server.test_app import MESSAGES, chat, client, post
from worker.wire import Grammar, TokenizerBundle

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = 'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


class Says:
    """Workers whose answer is a given text."""

    def __init__(self, bundle: TokenizerBundle, tokenizer: Tokenizer) -> None:
        self._bundle = bundle
        self._tokenizer = tokenizer

    def __call__(self, text: str, **bundle: Any) -> ScriptedWorker:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ScriptedWorker(dataclasses.replace(self._bundle, **bundle), reply=ids)

    def prompt(self, worker: ScriptedWorker) -> str:
        text: str = self._tokenizer.decode(list(worker.received[-1].prompt_ids), skip_special_tokens=False)
        return text


@pytest.fixture
def says(bundle: TokenizerBundle, raw_tokenizer: Tokenizer) -> Says:
    return Says(bundle, raw_tokenizer)


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


async def test_results_go_back_into_the_prompt(says: Says) -> None:
    worker = says("It rains.")
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    async with gateway(worker) as target:
        status, _, raw = await post(target.url, chat(messages=messages, tools=[WEATHER]))
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
    async with gateway(worker) as target:
        _, _, raw = await post(target.url, chat(tools=[WEATHER], tool_choice=named))
    choice = json.loads(raw)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Bonn"}'}
    assert worker.received[0].sampling.grammar == Grammar("json_schema", json.dumps(WEATHER["function"]["parameters"]))


async def test_tool_choice_none_leaves_text_alone(says: Says) -> None:
    worker = says(CALL)
    async with gateway(worker) as target:
        _, _, raw = await post(target.url, chat(tools=[WEATHER], tool_choice="none"))
    assert json.loads(raw)["choices"][0]["message"]["content"] == CALL
    assert "get_weather" not in says.prompt(worker)


async def test_thoughts_are_split_from_the_answer(says: Says) -> None:
    worker = says("<think>Well, 4.</think>\n\nIt is 4.", chat_template="{{ messages[0].content }}{# <think> #}")
    async with gateway(worker) as target:
        _, _, body = await post(target.url, chat())
        _, _, raw = await post(target.url, chat(stream=True))
    message = json.loads(body)["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("It is 4.", "Well, 4.")
    assert check_chat(raw) == ["It is 4."]
    assert json.loads(body)["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "json_object"}}, Grammar("json_object", "")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
            Grammar("json_schema", '{"type":"object"}'),
        ),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar("choice", '["a","b"]')),
        ({"structured_outputs": {"grammar": "root ::= x"}}, Grammar("grammar", "root ::= x")),
        ({"structured_outputs": {"json": {"type": "string"}}}, Grammar("json_schema", '{"type":"string"}')),
        ({"response_format": {"type": "text"}}, None),
    ],
)
async def test_structured_output_reaches_the_worker(
    says: Says, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    worker = says("{}")
    async with gateway(worker) as target:
        status, _, raw = await post(target.url, chat(**fields))
    assert status == 200, raw
    assert worker.received[0].sampling.grammar == grammar
