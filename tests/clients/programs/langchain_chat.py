"""python langchain_chat.py URL MODEL: a conversation through langchain-openai. Prints one JSON object."""

from __future__ import annotations

import json
import sys

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=12)
    is_capital: bool


def main(url: str, model: str) -> None:
    chat = ChatOpenAI(
        base_url=url, api_key="unused", model=model, temperature=0, max_tokens=24, max_retries=0, stream_usage=True
    )
    messages: list[BaseMessage] = [HumanMessage("What is the capital of France?")]
    first = chat.invoke(messages)
    streamed = list(chat.stream(messages))
    messages += [AIMessage(first.content), HumanMessage("Say that once more.")]
    second = chat.invoke(messages)
    limited = ChatOpenAI(base_url=url, api_key="unused", model=model, temperature=0, max_tokens=80, max_retries=0)
    city = limited.with_structured_output(City, method="json_schema", strict=True).invoke("Paris, as JSON.")
    assert isinstance(city, City), city
    called = limited.bind_tools([City], tool_choice="any").invoke("Tell me of Paris.")
    answer = {
        "first": first.content,
        "streamed": "".join(str(chunk.content) for chunk in streamed),
        "streamed_usage": next(chunk.usage_metadata for chunk in reversed(streamed) if chunk.usage_metadata),
        "second": second.content,
        "cached": second.usage_metadata["input_token_details"]["cache_read"],
        "city": city.model_dump(),
        "calls": [call["name"] for call in called.tool_calls],
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
