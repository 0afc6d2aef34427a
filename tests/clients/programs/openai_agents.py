"""python openai_agents.py URL MODEL: OpenAI's agents, by chats and by responses. Prints one JSON object."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel, Field

calls: list[str] = []


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=12)
    is_capital: bool


@function_tool
def tell_city(name: Literal["Paris", "Rome"]) -> str:
    """Describe a city."""
    calls.append(name)
    return f"{name} is large."


async def hold(model: Any) -> dict[str, Any]:
    settings = ModelSettings(temperature=0, max_tokens=80)
    forced = ModelSettings(temperature=0, max_tokens=80, tool_choice="required")
    plain = Agent(name="plain", model=model, model_settings=settings)
    first = await Runner.run(plain, "What is the capital of France?")
    stream = Runner.run_streamed(plain, "What is the capital of France?")
    kinds = {event.type async for event in stream.stream_events()}
    second = await Runner.run(plain, [*first.to_input_list(), {"role": "user", "content": "Say that once more."}])
    typed = Agent(name="typed", model=model, model_settings=settings, output_type=City)
    city = (await Runner.run(typed, "Paris, as JSON.")).final_output
    calls.clear()
    guide = Agent(name="guide", model=model, model_settings=forced, tools=[tell_city])
    run = await Runner.run(guide, "Tell me of Paris.", max_turns=3)
    return {
        "first": first.final_output,
        "streamed": stream.final_output,
        "kinds": sorted(kinds),
        "second": second.final_output,
        "cached": second.context_wrapper.usage.input_tokens_details.cached_tokens,
        "city": city.model_dump(),
        "calls": list(calls),
        "after_tool": run.final_output,
    }


async def run(url: str, model: str) -> dict[str, Any]:
    set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        kinds: list[Any] = [OpenAIChatCompletionsModel, OpenAIResponsesModel]
        return {kind.__name__: await hold(kind(model=model, openai_client=client)) for kind in kinds}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(*sys.argv[1:]))))
