"""A chat whose answer has to fit a JSON schema."""

import json
import os
import sys

from openai import OpenAI

url = f"{sys.argv[1]}/v1" if sys.argv[1:] else os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "unused"))
schema = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "inhabitants": {"type": "integer"}},
    "required": ["city", "inhabitants"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Name a large city and the number of its inhabitants."}],
    response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}},
    temperature=0,
    max_tokens=100,
)
print(json.loads(answer.choices[0].message.content))
