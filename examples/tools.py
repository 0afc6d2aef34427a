"""`tool_choice` names the function, so the model writes its arguments and nothing else."""

import json
import sys

from openai import OpenAI

client = OpenAI(base_url=f"{(sys.argv[1:] or ['http://127.0.0.1:8000'])[0]}/v1", api_key="unused")
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
