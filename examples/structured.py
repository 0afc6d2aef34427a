"""A chat whose answer has to fit a JSON schema."""

import json
import sys

from openai import OpenAI

client = OpenAI(base_url=f"{(sys.argv[1:] or ['http://127.0.0.1:8000'])[0]}/v1", api_key="unused")
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
