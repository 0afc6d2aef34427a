"""Four choices of one prompt: it is computed once. The same seed gives the same four again, on any worker."""

import os
import sys

from openai import OpenAI

url = f"{sys.argv[1]}/v1" if sys.argv[1:] else os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "unused"))
answer = client.completions.create(
    model=client.models.list().data[0].id,
    prompt="The three largest cities of Europe are",
    n=4,
    seed=7,
    max_tokens=8,
    logprobs=0,
)
for choice in answer.choices:
    print(f"{sum(choice.logprobs.token_logprobs):8.2f} {choice.text!r}")
