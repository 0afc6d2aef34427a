"""Refusals of well-formed requests that this worker can never serve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from cache.records import WorkerMember
from worker.common.capabilities import needs_of
from worker.wire import Failed, GenerateRequest, too_many_ids


def refusal(
    request: GenerateRequest,
    member: WorkerMember,
    pool_tokens: int,
    vocab_size: int,
    max_total_tokens: int | None = None,
) -> Failed | None:
    """Return why this worker can never serve the request. None: it can be submitted.

    `pool_tokens`: tokens that fit into the whole KV pool. `max_total_tokens`: TGI's `max_batch_total_tokens`.
    """
    if missing := needs_of(request.call, request.embed, request.media, request.adapter).difference(member.capabilities):
        message = f"this worker does not serve {', '.join(sorted(missing)):.200}"
        return Failed("unsupported", message, retryable=True)
    if (problem := _embed_problem(request, member.embedding_size)) is not None:
        return Failed("invalid_request", problem, retryable=False)
    limits = {
        "the context": member.max_model_len,
        "the KV pool": pool_tokens,
        "max_batch_total_tokens": max_total_tokens,
    }
    if (problem := next(_problems(request, vocab_size), None)) is not None:
        return Failed("invalid_request", problem, retryable=False)
    problem = _length_problem(request, limits)
    return None if problem is None else Failed("context_length_exceeded", problem, retryable=False)


def _embed_problem(request: GenerateRequest, embedding_size: int) -> str | None:
    embed, sampling = request.embed, request.sampling
    if embed is None:
        return None
    if sampling.max_tokens or sampling.prompt_logprobs is not None or len(request.choices) > 1:
        return "embed: an embedding has one choice, with max_tokens 0, and no logprobs"
    if embed.dimensions is not None and embed.dimensions > embedding_size:
        return f"dimensions: this model's embeddings have {embedding_size}"
    return None


def _length_problem(request: GenerateRequest, limits: Mapping[str, int | None]) -> str | None:
    num_prompt, num_output = len(request.prompt_ids), request.sampling.max_tokens
    for name, limit in limits.items():
        if limit is not None and num_prompt + num_output > limit:
            asked = f"max_tokens: {num_prompt} prompt tokens and {num_output} output tokens"
            return f"{asked} exceed {name} of {limit} tokens; shorten the prompt or lower max_tokens"
    return None


def _problems(request: GenerateRequest, vocab_size: int) -> Iterator[str]:
    sampling = request.sampling
    if (problem := too_many_ids(sampling, len(request.choices))) is not None:
        yield problem
    biased = [token_id for token_id, _ in sampling.logit_bias]
    allowed, stops = sampling.allowed_token_ids or (), sampling.stop_token_ids
    for name, token_ids in (("logit_bias", biased), ("allowed_token_ids", allowed), ("stop_token_ids", stops)):
        if _are_outside(token_ids, vocab_size):
            yield f"{name}: token ids go from 0 to {vocab_size - 1}"
    if not request.prompt_ids:
        if request.call is None or not request.call.pools:
            yield "prompt_ids: at least one token is needed"
    elif max(request.prompt_ids) >= vocab_size:
        yield f"prompt_ids: {max(request.prompt_ids)} is outside the vocabulary of {vocab_size}"
    indices = [choice.index for choice in request.choices]
    if len(set(indices)) < len(indices):
        yield f"choices: distinct indices expected, got {indices}"
    if any(_are_outside(choice.output_ids, vocab_size) for choice in request.choices):
        yield f"output_ids: a token is outside the vocabulary of {vocab_size}"
    if any(len(choice.output_ids) > sampling.max_tokens for choice in request.choices):
        yield f"output_ids: a choice already has more than max_tokens ({sampling.max_tokens}) tokens"


def _are_outside(token_ids: Sequence[int], vocab_size: int) -> bool:
    """Return whether a token is outside the vocabulary. `min` and `max` are fast on long lists."""
    return len(token_ids) > 0 and (min(token_ids) < 0 or max(token_ids) >= vocab_size)
