"""/v1/responses with the openai client, whose stream helper checks every event against its types."""

from __future__ import annotations

import json
import time
from typing import Any

from openai.types.responses import Response

from server.api.prompts.items import messages_of_items
from server.schema.fields import TextPart
from server.schema.requests import InputItem, ResponsesRequest
from server.schema.tools import ToolSet
from tests.server.api.test_tools import CALL, WEATHER
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import Says
from tests.server.test_app import client, post
from worker.wire import Grammar

TOOL: Any = {"type": "function", "strict": None, **WEATHER["function"]}


async def test_text_streamed_and_unstreamed(says: Says) -> None:
    worker = says("The capital is Paris. 🎉")
    worker.num_cached_tokens = 16
    async with gateway(worker) as target, client(target) as sdk:
        answer = await sdk.responses.create(model="tiny", input="Capital?", instructions="Be brief.", store=False)
        assert answer.output_text == "The capital is Paris. 🎉"
        assert answer.status == "completed"
        Response.model_validate(answer.to_dict())  # the client itself fills in no missing field
        assert answer.usage is not None
        assert answer.usage.input_tokens_details.cached_tokens == 16
        assert answer.usage.input_tokens == len(worker.received[0].prompt_ids)
        async with sdk.responses.stream(model="tiny", input="Capital?", instructions="Be brief.") as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert final.output_text == answer.output_text
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
    assert says.prompt(worker).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nCapital?")


async def test_events_are_numbered_and_nested(says: Says) -> None:
    async with gateway(says(CALL)) as target:
        _, headers, raw = await post(
            target.url, {"model": "tiny", "input": "x", "tools": [TOOL], "stream": True}, "/v1/responses"
        )
    assert headers["content-type"].startswith("text/event-stream")
    assert raw.endswith(b"\n\n")
    events = []
    for block in raw.decode()[:-2].split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    depth = 0
    for event in events:
        depth += event["type"].endswith(".added") - event["type"].endswith(("content_part.done", "output_item.done"))
        assert 0 <= depth <= 2
    assert depth == 0
    kinds = [item["type"] for item in events[-1]["response"]["output"]]
    assert kinds == ["message", "function_call"]


async def test_tools_and_their_results(says: Says) -> None:
    worker = says(CALL)
    async with gateway(worker) as target, client(target) as sdk:
        answer = await sdk.responses.create(model="tiny", input="Weather?", tools=[TOOL])
        message, call = answer.output
        assert message.type == "message"
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Köln"})
        history: Any = [
            {"role": "user", "content": "Weather?"},
            *(item.model_dump(exclude_none=True) for item in answer.output),
            {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
        ]
        await sdk.responses.create(model="tiny", input=history, tools=[TOOL])
    prompt = says.prompt(worker)
    assert "<tool_response>\nrain\n</tool_response>" in prompt
    assert prompt.count("<|im_start|>assistant\n") == 2, "text and calls of one turn are one message"


async def test_length_is_incomplete_and_schemas_reach_the_worker(says: Says) -> None:
    worker = says("one two three four")
    schema = {"type": "json_schema", "name": "s", "schema": {"type": "object"}}
    async with gateway(worker) as target:
        body = {"model": "tiny", "input": "x", "max_output_tokens": 2, "text": {"format": schema}}
        _, _, raw = await post(target.url, body, "/v1/responses")
    answer = json.loads(raw)
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert worker.received[0].sampling.grammar == Grammar(
        "json_schema", '{"type":"object","x-guidance":{"lenient":true}}'
    )


async def test_log_probabilities_of_the_answer_alone(says: Says) -> None:
    worker = says("\n<think>Hm.</think>Yes, 4. \U0001f389", chat_template="{{ messages[0].content }}{# <think> #}")
    async with gateway(worker) as target, client(target) as sdk:
        answer = await sdk.responses.create(model="tiny", input="x", top_logprobs=2)
        async with sdk.responses.stream(model="tiny", input="x", include=["message.output_text.logprobs"]) as stream:
            final = await stream.get_final_response()
    for response, num_top in ((answer, 2), (final, 0)):
        message: Any = response.output[-1]
        logprobs = message.content[0].logprobs
        *text, end = [bytes(token.bytes) for token in logprobs]
        assert b"".join(text).decode() == message.content[0].text == "Yes, 4. \U0001f389"
        assert end == b"<|im_end|>"
        assert {len(token.top_logprobs) for token in logprobs} == {num_top}


async def test_log_probabilities_are_not_those_of_calls(says: Says) -> None:
    async with gateway(says(f"{CALL}\nDone.")) as target, client(target) as sdk:
        answer = await sdk.responses.create(model="tiny", input="x", tools=[TOOL], top_logprobs=1)
        async with sdk.responses.stream(model="tiny", input="x", tools=[TOOL], top_logprobs=1) as stream:
            final = await stream.get_final_response()
    for response in (answer, final):
        before, _, after = response.output
        for message, end in ((before, ""), (after, "<|im_end|>")):
            part: Any = message.content[0]  # type: ignore[union-attr]
            assert "".join(each.token for each in part.logprobs) == part.text + end


async def test_thousands_of_calls_in_a_row_are_one_message() -> None:
    """They take linear time: each adds to the message before it."""
    items = [InputItem(type="function_call", call_id=f"c{n}", name="f", arguments="{}") for n in range(50_000)]
    cpu_s = {5_000: 1e9, 50_000: 1e9}
    for count in (5_000, 50_000) * 3:
        request = ResponsesRequest(model="tiny", input=items[:count])
        begun_s = time.thread_time()
        [message], _ = messages_of_items(request, ToolSet())
        cpu_s[count] = min(cpu_s[count], time.thread_time() - begun_s)
        assert [call.id for call in message.tool_calls or ()] == [f"c{n}" for n in range(count)]
    assert cpu_s[50_000] < 50 * cpu_s[5_000], "a hundred times as long would be quadratic"


def test_a_text_after_a_call_is_of_its_message() -> None:
    """Else a result would not follow its call."""
    calls = {id_: InputItem(type="function_call", call_id=id_, name="f", arguments="{}") for id_ in "ab"}
    results = [InputItem(type="function_call_output", call_id=id_, output="42") for id_ in "ab"]
    text = InputItem(role="assistant", content=[TextPart(type="output_text", text="I look.")])
    thought = InputItem(type="reasoning", summary=[{"type": "summary_text", "text": "hm"}])
    before, user = InputItem(role="assistant", content="Well."), InputItem(role="user", content="hi")
    for items, content in (
        ([calls["a"], text, calls["b"]], ["I look."]),
        ([calls["a"], thought, text, calls["b"]], ["I look."]),
        ([before, calls["a"], text, calls["b"]], ["Well.", "I look."]),
    ):
        request = ResponsesRequest(model="tiny", instructions="", input=[user, *items, *results])
        messages, _ = messages_of_items(request, ToolSet())
        assert [message.role for message in messages] == ["user", "assistant", "tool", "tool"]
        assert [call.id for call in messages[1].tool_calls or ()] == ["a", "b"]
        assert [part.text for part in messages[1].content] == content  # type: ignore[union-attr]
        assert messages[1].reasoning_content == ("hm" if thought in items else None)
