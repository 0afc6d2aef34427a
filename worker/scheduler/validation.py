"""Validation of requests by the worker, whatever its gateways accept.

A number that a tensor cannot hold, or a NaN, would fail the step of every request in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

from cache.types import HASH_BYTES
from worker.scheduler.budget import BatchLimits
from worker.wire import Failed, GenerateRequest, too_many_ids

_U32: Final = (1 << 32) - 1
_MAX_CHOICES: Final = 1024
_MAX_BIAS: Final = 1e6
_RANGES: Final[dict[str, tuple[float, float]]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 1e6),
    "frequency_penalty": (-100.0, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "top_k": (0, _U32),
    "max_tokens": (0, _U32),
    "min_tokens": (0, _U32),
    "logprobs": (0, 1024),
    "prompt_logprobs": (0, 1024),
    "priority": (-1000, 1000),
    "deadline_s": (-math.inf, 1e9),
}
_MAX_LENGTHS: Final = {
    "logit_bias": 1_000_000,
    "bad_words": 65_536,
    "allowed_token_ids": 1_000_000,
    "stop_token_ids": 65_536,
}


def refusal(request: GenerateRequest, limits: BatchLimits, pool_tokens: int, vocab_size: int) -> Failed | None:
    """Return why this worker can never serve the request. None: it can be submitted.

    `pool_tokens`: tokens that fit into the whole KV pool.
    """
    problem = next(_problems(request, limits, pool_tokens, vocab_size), None)
    return None if problem is None else Failed("invalid_request", problem, retryable=False)


def _problems(request: GenerateRequest, limits: BatchLimits, pool_tokens: int, vocab_size: int) -> Iterator[str]:
    sampling = request.sampling
    yield from _out_of_bounds(request, vocab_size)
    if len(request.root) != HASH_BYTES:
        yield f"root: {HASH_BYTES} bytes expected, got {len(request.root)}"
    if not request.prompt_ids:
        yield "prompt_ids: at least one token is needed"
    elif max(request.prompt_ids) >= vocab_size:
        yield f"prompt_ids: {max(request.prompt_ids)} is outside the vocabulary of {vocab_size}"
    indices = [choice.index for choice in request.choices]
    if not indices or len(set(indices)) < len(indices):
        yield f"choices: distinct indices expected, got {indices}"
    if any(_are_outside(choice.output_ids, vocab_size) for choice in request.choices):
        yield f"output_ids: a token is outside the vocabulary of {vocab_size}"
    if any(len(choice.output_ids) > sampling.max_tokens for choice in request.choices):
        yield f"output_ids: a choice already has more than max_tokens ({sampling.max_tokens}) tokens"
    total_tokens = len(request.prompt_ids) + sampling.max_tokens
    for limit, name in (
        (limits.max_model_len, "the context"),
        (pool_tokens, "the KV pool"),
        (limits.max_batch_total_tokens, "max_batch_total_tokens"),
    ):
        if limit is not None and total_tokens > limit:
            yield (
                f"max_tokens: {len(request.prompt_ids)} prompt tokens and {sampling.max_tokens} output tokens exceed"
                f" {name} of {limit} tokens; shorten the prompt or lower max_tokens"
            )


def _out_of_bounds(request: GenerateRequest, vocab_size: int) -> Iterator[str]:
    """Name the fields whose numbers are out of range, other than the prompt."""
    sampling = request.sampling
    for name, (low, high) in _RANGES.items():
        value = getattr(sampling if hasattr(sampling, name) else request, name)
        if value is not None and not low <= value <= high:  # NaN is in no range
            yield f"{name}: {low:g} to {high:g}, got {value}"
    if len(request.choices) > _MAX_CHOICES:
        yield f"choices: at most {_MAX_CHOICES}, got {len(request.choices)}"
    for choice in request.choices:
        if not 0 <= choice.index <= _U32:
            yield f"choices: index 0 to {_U32}, got {choice.index}"
        if not -(1 << 63) <= choice.seed < 1 << 64:
            yield "choices: seed has more than 64 bits"
    for name, max_length in _MAX_LENGTHS.items():
        if len(getattr(sampling, name) or ()) > max_length:
            yield f"{name}: at most {max_length} entries"
    if (problem := too_many_ids(sampling, len(request.choices))) is not None:
        yield problem
    biased, biases = zip(*sampling.logit_bias, strict=True) if sampling.logit_bias else ((), ())
    if not all(map(_MAX_BIAS.__ge__, map(abs, biases))):
        yield f"logit_bias: -{_MAX_BIAS:g} to {_MAX_BIAS:g}"
    allowed, stops = sampling.allowed_token_ids or (), sampling.stop_token_ids
    for name, token_ids in (("logit_bias", biased), ("allowed_token_ids", allowed), ("stop_token_ids", stops)):
        if _are_outside(token_ids, vocab_size):
            yield f"{name}: token ids go from 0 to {vocab_size - 1}"
    if _are_outside(list(chain.from_iterable(sampling.bad_words)), _U32 + 1):  # beyond the vocabulary they are harmless
        yield f"bad_words: a token id is 0 to {_U32}"


def _are_outside(token_ids: Sequence[int], vocab_size: int) -> bool:
    """Tell whether any token is no token of the vocabulary. `min` and `max`, as the lists may be long."""
    return len(token_ids) > 0 and (min(token_ids) < 0 or max(token_ids) >= vocab_size)
