"""python huggingface_chat.py URL MODEL: a conversation through huggingface_hub's client. Prints one JSON object."""

from __future__ import annotations

import json
import sys
from typing import Any

import jsonschema
from huggingface_hub import InferenceClient
from huggingface_hub.errors import BadRequestError

SCHEMA: Any = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "is_capital": {"type": "boolean"}},
    "required": ["name", "is_capital"],
    "additionalProperties": False,
}


def main(url: str, model: str) -> None:
    client = InferenceClient(base_url=url, api_key="unused", timeout=120)
    common: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 24}
    messages: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    first = client.chat_completion(messages, **common).choices[0].message.content
    options: Any = {"include_usage": True}
    chunks = list(client.chat_completion(messages, stream=True, stream_options=options, **common))
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Say that once more."}]
    second = client.chat.completions.create(messages, logprobs=True, top_logprobs=2, **common).choices[0]
    question: Any = [{"role": "user", "content": "Paris, as JSON."}]
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    city = client.chat_completion(question, response_format=form, **{**common, "max_tokens": 80}).choices[0].message
    jsonschema.validate(json.loads(city.content), SCHEMA)
    tool: Any = {"type": "function", "function": {"name": "tell_city", "description": "Tell.", "parameters": SCHEMA}}
    forced = {**common, "max_tokens": 80, "tool_choice": {"type": "function", "function": {"name": "tell_city"}}}
    [call] = client.chat_completion(question, tools=[tool], **forced).choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    refused = ""
    try:
        client.chat_completion(messages, **common, top_p=7)
    except BadRequestError as error:
        refused = str(error)
    answer = {
        "first": first,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "streamed_usage": next(chunk.usage.completion_tokens for chunk in reversed(chunks) if chunk.usage),
        "second": second.message.content,
        "logprobs": len(second.logprobs.content),
        "city": json.loads(city.content),
        "call": call.function.name,
        "refused": refused,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
