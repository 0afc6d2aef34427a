"""Four choices of one prompt: it is computed once. The same seed gives the same four again, on any worker."""

import sys

from openai import OpenAI

client = OpenAI(base_url=f"{(sys.argv[1:] or ['http://127.0.0.1:8000'])[0]}/v1", api_key="unused")
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
