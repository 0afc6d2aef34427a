"""python anthropic_messages.py URL MODEL: a conversation through Anthropic's SDK. Prints one JSON object."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

import anthropic
from pydantic import BaseModel, Field

CITY: Any = {
    "name": "tell_city",
    "description": "Tell of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["name"],
        "additionalProperties": False,
    },
    "cache_control": {"type": "ephemeral"},
}


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=12)
    is_capital: bool


def refusal(client: anthropic.Anthropic, **fields: Any) -> dict[str, Any]:
    """The SDK's error for a request that is refused."""
    try:
        client.messages.create(**fields)
    except anthropic.APIStatusError as error:
        return {"id": error.request_id, "class": type(error).__name__, "type": error.type, "message": error.api_message}
    raise AssertionError(f"not refused: {fields}")


async def streamed_async(url: str, **fields: Any) -> str:
    async with (
        anthropic.AsyncAnthropic(base_url=url, auth_token="unused", max_retries=0) as client,
        client.messages.stream(**fields) as stream,
    ):
        return "".join([text async for text in stream.text_stream])


def call_and_result(client: anthropic.Anthropic, **fields: Any) -> dict[str, Any]:
    """A call, streamed and not, and the answer to its result."""
    messages: list[Any] = [{"role": "user", "content": "Tell me of Paris."}]
    fields |= {"tools": [CITY]}
    choice: Any = {"type": "tool", "name": "tell_city"}
    called = client.messages.create(messages=messages, tool_choice=choice, **fields)
    with client.messages.stream(messages=messages, tool_choice=choice, **fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    [use], [again] = called.content, final.content
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "Large."}]}
    messages += [called.to_param(), {"role": "user", "content": [result, {"type": "text", "text": "And?"}]}]
    answer = client.messages.create(messages=messages, **fields)
    return {
        "stop_reason": called.stop_reason,
        "input": use.input,
        "streamed": again.input,
        "kinds": sorted(set(kinds)),
        "answer": answer.content[0].text,
    }


def tool_run(client: anthropic.Anthropic, **fields: Any) -> dict[str, Any]:
    """The tool runner's calls: it asks for threads, and goes on without them."""
    cities: list[str] = []

    @anthropic.beta_tool
    def name_city(name: Literal["Paris", "Rome"]) -> str:
        """Name a city."""
        cities.append(name)
        return "Large."

    runner = client.beta.messages.tool_runner(
        messages=[{"role": "user", "content": "Name Paris."}],
        tools=[name_city],
        tool_choice={"type": "tool", "name": "name_city"},
        max_iterations=2,
        **fields,
    )
    return {"kinds": [block.type for message in runner for block in message.content], "cities": cities}


def main(url: str, model: str) -> None:
    url = url.removesuffix("/v1")
    client = anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0)
    common: dict[str, Any] = {"model": model, "max_tokens": 24, "extra_body": {"temperature": 0}}
    messages: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    first = client.messages.create(messages=messages, **common)
    with client.messages.stream(messages=messages, **common) as stream:
        streamed = "".join(stream.text_stream)
        final = stream.get_final_message()
    counted = client.messages.count_tokens(model=model, messages=messages).input_tokens
    stopped = client.messages.create(messages=messages, stop_sequences=["Paris"], **common)
    raw = client.messages.create(messages=messages, stream=True, **common)
    second = client.messages.create(
        messages=[*messages, first.to_param(), {"role": "user", "content": "Say that once more."}],
        system=[{"type": "text", "text": "You are a helpful AI assistant named SmolLM, trained by Hugging Face"}],
        **common,
    )
    parsed = client.messages.parse(
        messages=[{"role": "user", "content": "Paris, as JSON."}], output_format=City, **{**common, "max_tokens": 80}
    )
    huge = client.messages.create(messages=messages, timeout=60, **{**common, "max_tokens": 10_000_000})
    image = {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://a.b/c.png"}}]}
    seen = client.messages.with_raw_response.create(messages=[image], **common)
    answer = {
        "first": first.content[0].text,
        "stop_reason": first.stop_reason,
        "counted": counted,
        "input": first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0),
        "streamed": streamed,
        "streamed_output": final.usage.output_tokens,
        "streamed_async": asyncio.run(streamed_async(url, messages=messages, **common)),
        "events": [event.type for event in raw][:2],
        "stop_sequence": stopped.stop_sequence,
        "second": second.content[0].text,
        "cached": second.usage.cache_read_input_tokens,
        "city": parsed.parsed_output.model_dump(),
        "tools": call_and_result(client, **common),
        "no_model": refusal(client, **{**common, "model": "none"}, messages=messages),
        "wrong": refusal(client, **common, messages=[{"role": "user", "content": [{"type": "text", "text": 5}]}]),
        "image": seen.headers["x-headstart-ignored"],
        "too_long": refusal(client, **common, messages=[{"role": "user", "content": "word " * 50_000}]),
        "clamped": huge.stop_reason,
        "run": tool_run(client, **common),
        "models": [[listed.id, listed.type, listed.display_name] for listed in client.models.list()],
        "model": client.models.retrieve(model).created_at.isoformat(),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
