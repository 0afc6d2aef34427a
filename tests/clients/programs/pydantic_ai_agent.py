"""python pydantic_ai_agent.py URL MODEL: pydantic-ai's agents, with typed output and a tool. Prints one JSON object."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=12)
    is_capital: bool


async def streamed(agent: Agent[None, str], prompt: str) -> str:
    async with agent.run_stream(prompt) as run:
        return "".join([delta async for delta in run.stream_text(delta=True)])


def main(url: str, model: str) -> None:
    provider = OpenAIProvider(base_url=url, api_key="unused")
    settings = ModelSettings(temperature=0, max_tokens=80)
    chat = OpenAIChatModel(model, provider=provider, settings=settings)
    responses = OpenAIResponsesModel(model, provider=provider, settings=settings)
    question = "What is the capital of France?"
    plain = Agent(chat)
    first = plain.run_sync(question)
    second = plain.run_sync("Say that once more.", message_history=first.all_messages())
    answer: dict[str, Any] = {
        "first": first.output,
        "streamed": asyncio.run(streamed(plain, question)),
        "second": second.output,
        "cached": second.usage.cache_read_tokens,
        "response": Agent(responses).run_sync(question).output,
        "by_tool": Agent(chat, output_type=ToolOutput(City)).run_sync("Paris, as JSON.").output.model_dump(),
        "by_schema": Agent(chat, output_type=NativeOutput(City)).run_sync("Paris, as JSON.").output.model_dump(),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
