"""python llamaindex_chat.py URL MODEL: a conversation through llama-index. Prints one JSON object."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=12)
    is_capital: bool


def main(url: str, model: str) -> None:
    common: dict[str, Any] = {"model": model, "api_base": url, "api_key": "unused", "temperature": 0, "max_tokens": 24}
    common |= {"max_retries": 0, "context_window": 2048, "timeout": 120}
    chat = OpenAILike(is_chat_model=True, is_function_calling_model=True, **common)
    messages = [ChatMessage(role="user", content="What is the capital of France?")]
    first = chat.chat(messages)
    streamed = list(chat.stream_chat(messages))
    later = [*messages, first.message, ChatMessage(role="user", content="Say that once more.")]
    second = asyncio.run(chat.achat(later))
    limited = OpenAILike(is_chat_model=True, should_use_structured_outputs=True, **{**common, "max_tokens": 80})
    city = limited.as_structured_llm(City).chat([ChatMessage(role="user", content="Paris, as JSON.")]).raw
    plain = OpenAILike(is_chat_model=False, **common)
    prompt = "The capital of France is"
    answer = {
        "first": first.message.content,
        "streamed": streamed[-1].message.content,
        "deltas": "".join(chunk.delta or "" for chunk in streamed),
        "second": second.message.content,
        "cached": second.raw.usage.prompt_tokens_details.cached_tokens,
        "city": city.model_dump(),
        "completed": plain.complete(prompt).text,
        "completed_stream": "".join(chunk.delta or "" for chunk in plain.stream_complete(prompt)),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
