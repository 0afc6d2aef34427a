"""python litellm_chat.py URL MODEL: a conversation through litellm, blocking and not. Prints one JSON object."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm


def main(url: str, model: str) -> None:
    common: dict[str, Any] = {"model": f"openai/{model}", "api_base": url, "api_key": "unused"}
    common |= {"temperature": 0, "max_tokens": 24, "num_retries": 0}
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    first = litellm.completion(messages=messages, **common).choices[0].message.content
    chunks = list(litellm.completion(messages=messages, stream=True, **common))
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Say that once more."}]
    second = asyncio.run(litellm.acompletion(messages=messages, **common))
    refused = ""
    try:
        litellm.completion(messages=messages, **common, top_logprobs=99, logprobs=True)
    except litellm.BadRequestError as error:
        refused = str(error)
    too_long = ""
    try:
        litellm.completion(messages=[{"role": "user", "content": "word " * 20_000}], **common)
    except litellm.ContextWindowExceededError as error:
        too_long = str(error)
    answer = {
        "first": first,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
        "second": second.choices[0].message.content,
        "cached": second.usage.prompt_tokens_details.cached_tokens,
        "refused": refused,
        "too_long": too_long,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
