"""Two turns, streamed. The second prompt begins with the first: its worker has that part cached."""

import os
import sys

from openai import OpenAI

url = f"{sys.argv[1]}/v1" if sys.argv[1:] else os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "unused"))
model = client.models.list().data[0].id
system = "You are a helpful assistant who answers questions about geography in one sentence."
messages = [{"role": "system", "content": system}]

for question in ("What is the capital of France?", "And of Italy?"):
    messages.append({"role": "user", "content": question})
    with client.chat.completions.with_streaming_response.create(
        model=model,
        messages=messages,
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    ) as response:
        worker = response.headers["x-headstart-worker"]
        answer = ""
        for chunk in response.parse():
            if chunk.choices:
                piece = chunk.choices[0].delta.content or ""
                answer += piece
                print(piece, end="", flush=True)
            elif chunk.usage:
                cached = chunk.usage.prompt_tokens_details.cached_tokens
                print(f"\n    {worker}: {cached} of {chunk.usage.prompt_tokens} prompt tokens were cached")
    messages.append({"role": "assistant", "content": answer})
