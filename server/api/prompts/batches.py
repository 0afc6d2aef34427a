"""The prompts of a request with several texts: tokenised one by one, with a bound on all of them together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from msgspec.structs import replace

from server.event_loop import TimeSlice
from server.request.choice import GenerationSpec
from server.schema.decoding import invalid

MAX_BATCH_TOKENS: Final = 1 << 20
"""The limit for all prompts of a request together, or one context if that is more."""
Prompt = str | list[int]


async def batch_specs(
    shared: GenerationSpec,
    prompts: Sequence[Prompt],
    encode: Callable[[Prompt], Awaitable[Sequence[int]]],
    complete: Callable[[GenerationSpec, Prompt, int], GenerationSpec] = lambda spec, prompt, num_tokens: spec,
) -> tuple[GenerationSpec, ...]:
    """Return a spec per prompt, with rests between them. Raises InvalidRequestError for too many tokens.

    `complete` adds what depends on the prompt. It gets the tokens of all prompts so far.
    """
    limit = max(MAX_BATCH_TOKENS, shared.model.max_model_len)
    specs: list[GenerationSpec] = []
    time_slice, num_tokens = TimeSlice(), 0
    for index, prompt in enumerate(prompts):
        prompt_ids = await encode(prompt)
        num_tokens += len(prompt_ids)
        if num_tokens > limit:
            raise invalid(shared.prompt_param, f"has at most {limit} tokens in all: send several requests")
        id_ = shared.request_id if len(prompts) == 1 else f"{shared.request_id}-{index}"
        spec = replace(shared, request_id=id_, prompt_ids=prompt_ids, first_index=index * len(shared.seeds))
        specs.append(complete(spec, prompt, num_tokens))
        await time_slice.rest()
    return tuple(specs)
