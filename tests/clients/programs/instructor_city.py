"""python instructor_city.py URL MODEL: typed answers through instructor. Prints one JSON object."""

from __future__ import annotations

import json
import sys
from typing import Any

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field


class City(BaseModel):
    """A city with only these fields: a small model would invent others."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    is_capital: bool


def main(url: str, model: str) -> None:
    sdk = openai.OpenAI(base_url=url, api_key="unused", max_retries=0)
    answer: dict[str, Any] = {}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(sdk, mode=mode)
        fields: Any = {"model": model, "temperature": 0, "max_tokens": 80, "max_retries": 0, "response_model": City}
        fields["messages"] = [{"role": "user", "content": "Paris, as JSON."}]
        city, raw = client.chat.completions.create_with_completion(**fields)
        partial = list(client.chat.completions.create_partial(**fields))
        answer[mode.value] = {
            "city": city.model_dump(),
            "partial": partial[-1].model_dump(),
            "parts": len(partial),
            "output": raw.usage.completion_tokens,
        }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
