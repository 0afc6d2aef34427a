"""`tool_choice` names the function, so the model writes its arguments and nothing else."""

import json
import os
import sys

from openai import OpenAI

url = f"{sys.argv[1]}/v1" if sys.argv[1:] else os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "unused"))
weather = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
answer = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "How is the weather in Rome?"}],
    tools=[weather],
    tool_choice={"type": "function", "function": {"name": "get_weather"}},
    temperature=0,
    max_tokens=60,
)
call = answer.choices[0].message.tool_calls[0].function
print(call.name, json.loads(call.arguments))
