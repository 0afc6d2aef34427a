"""python openai_chat.py URL MODEL: a conversation through OpenAI's SDK, blocking and not. Prints one JSON object."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai
from pydantic import BaseModel, Field


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=12)
    is_capital: bool


async def streamed_async(url: str, **fields: Any) -> str:
    async with (
        openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client,
        client.chat.completions.stream(**fields) as stream,
    ):
        return "".join([event.delta async for event in stream if event.type == "content.delta"])


def refusal(client: openai.OpenAI, **fields: Any) -> list[str | None]:
    """The class, code and field of the SDK's error for a request that is refused, if it has an id."""
    try:
        client.chat.completions.create(**fields)
    except openai.APIStatusError as error:
        if error.request_id:
            return [type(error).__name__, error.code, error.param]
    raise AssertionError(f"not refused: {fields}")


def main(url: str, model: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="unused", max_retries=0)
    common: dict[str, Any] = {"model": model, "temperature": 0, "max_completion_tokens": 24}
    messages: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    first = client.chat.completions.create(messages=messages, **common).choices[0].message
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(messages=messages, stream=True, stream_options=options, **common))
    history = [*messages, first, {"role": "user", "content": "Say that once more."}]
    second = client.chat.completions.create(messages=history, **common)
    as_json: Any = {**common, "max_completion_tokens": 80, "messages": [{"role": "user", "content": "Paris, as JSON."}]}
    city = client.chat.completions.parse(response_format=City, **as_json).choices[0].message.parsed
    tool = openai.pydantic_function_tool(City)
    once: Any = {"tool_choice": "required", "parallel_tool_calls": False, **as_json}
    called = client.chat.completions.parse(tools=[tool], **once).choices[0].message
    response = client.responses.create(model=model, temperature=0, max_output_tokens=24, input=messages)
    of_response = client.responses.parse(
        model=model, temperature=0, max_output_tokens=80, input="Paris, as JSON.", text_format=City
    )
    completion = client.completions.create(
        model=model, temperature=0, max_tokens=4, prompt="The capital of France is", logprobs=2
    ).choices[0]
    answer = {
        "first": first.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "streamed_usage": chunks[-1].usage.completion_tokens,
        "streamed_async": asyncio.run(streamed_async(url, messages=messages, **common)),
        "second": second.choices[0].message.content,
        "cached": second.usage.prompt_tokens_details.cached_tokens,
        "city": city.model_dump(),
        "call": called.tool_calls[0].function.parsed_arguments.model_dump(),
        "response": response.output_text,
        "city_of_response": of_response.output_parsed.model_dump(),
        "completion": completion.text,
        "logprobs": completion.logprobs.token_logprobs,
        "no_model": refusal(client, messages=messages, **{**common, "model": "none"}),
        "too_long": refusal(client, messages=[{"role": "user", "content": "word " * 20_000}], **common),
        "wrong": refusal(client, messages=messages, **common, top_p=7),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
