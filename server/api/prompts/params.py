"""A checked body's sampling parameters: the fields that need the model's vocabulary."""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final

from msgspec.structs import replace

from server.auth.identity import Identity, allowed_priority, request_salt
from server.errors import InvalidRequestError
from server.event_loop import sliced
from server.models.served_model import ServedModel
from server.request.choice import GenerationSpec
from server.schema.decoding import invalid
from server.schema.fields import CallerFields, ModelFields
from server.text.detokenizer import TextRules
from server.text.output_parser import OutputRules
from worker.wire import SamplingParams, too_many_ids

MAX_BAD_WORDS_CHARS: Final = 1 << 18
"""The limit for all bad words of a request together."""
MAX_KWARGS_BYTES: Final = 1 << 16
"""The limit for chat_template_kwargs, as JSON."""
_WORDS_AT_ONCE: Final = 16  # a call of the tokenizer that stays short
_SAME_FIELDS: Final = (
    *("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("min_tokens", "ignore_eos"),
)
"""Fields with one name in the body, in the model's defaults and on the wire, sent to a worker unchanged."""
_SEED_MASK: Final = 2**63 - 1  # seeds travel as signed 64-bit numbers


def new_spec(id_: str, model: ServedModel, identity: Identity, fields: CallerFields, param: str) -> GenerationSpec:
    """Return the spec of a request without its prompt: the caller's part. Errors of the prompt will name `param`.

    Raises ForbiddenError.
    """
    return GenerationSpec(
        request_id=id_,
        model=model,
        root=model.root(request_salt(identity, fields.cache_salt)),
        prompt_param=param,
        priority=allowed_priority(identity, fields.priority),
        tenant=identity.tag,
        weight=identity.key.weight,
        affinity_key=fields.affinity_key,
    )


def choice_seeds(seed: int | None, num_choices: int) -> tuple[int, ...]:
    """Give choice 0 the request's seed, and choice i a hash of it and i; draw one when the request has none."""
    first = (int.from_bytes(os.urandom(8)) if seed is None else seed) & _SEED_MASK
    seeds = [first]
    for index in range(1, num_choices):
        both = first.to_bytes(8, "little") + index.to_bytes(4, "little")
        digest = blake2b(both, digest_size=8, person=b"headstart-seed")
        seeds.append(int.from_bytes(digest.digest(), "little") & _SEED_MASK)
    return tuple(seeds)


async def with_sampling(
    known: SamplingParams, request: ModelFields, model: ServedModel, num_choices: int
) -> SamplingParams:
    """Add the client's values, else the model's defaults, to a worker's parameters. Raises InvalidRequestError."""
    vocab_size, defaults = model.bundle.vocab_size, model.bundle.sampling_defaults
    allowed = request.allowed_token_ids
    both = [(name, getattr(given, name, None)) for given in (defaults, request) for name in _SAME_FIELDS]
    params = replace(
        known,
        top_k=max(0, (defaults.top_k or 0) if request.top_k is None else request.top_k),
        logit_bias=await _logit_bias(request.logit_bias, vocab_size) if request.logit_bias else (),
        bad_words=await _bad_words(request.bad_words, model) if request.bad_words else (),
        allowed_token_ids=in_vocabulary(dict.fromkeys(allowed), vocab_size, "allowed_token_ids") if allowed else None,
        stop_token_ids=in_vocabulary(request.stop_token_ids or (), vocab_size, "stop_token_ids"),
        **{name: value for name, value in both if value is not None},
    )
    lists = (allowed, request.logit_bias, request.bad_words, request.stop_token_ids)
    if any(lists) and (problem := too_many_ids(params, num_choices)) is not None:
        param = problem.partition(":")[0].partition(",")[0]  # the problem begins with its fields, the longest first
        raise InvalidRequestError(f"{problem}.", param=param)
    return params


def in_vocabulary(token_ids: Iterable[int], vocab_size: int, param: str) -> tuple[int, ...]:
    """Return the ids. Raises InvalidRequestError for an id beyond the vocabulary."""
    ids = tuple(token_ids)
    if ids and max(ids) >= vocab_size:
        raise invalid(param, f"has token ids from 0 to {vocab_size - 1}, got {next(i for i in ids if i >= vocab_size)}")
    return ids


def text_rules(request: ModelFields, stops: tuple[str, ...], model: ServedModel, parser: OutputRules) -> TextRules:
    """Return how tokens become text, with the special tokens that the parser has to see."""
    terminal = frozenset(request.stop_token_ids or ())
    return TextRules(
        stops=stops,
        include_stop=bool(request.include_stop_str_in_output),
        skip_special=request.skip_special_tokens is not False and not parser.shows_special,
        terminal_ids=terminal if request.ignore_eos else terminal | model.tokenizer.eos_ids,
        shown_ids=model.tokenizer.shown_ids(parser.markers()),
    )


async def _logit_bias(bias: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    async for key, value in sliced(bias.items()):
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < vocab_size):
            raise invalid(
                "logit_bias", f"has token ids from 0 to {vocab_size - 1}, as strings, for keys, got {key[:40]!r}"
            )
        pairs.append((int(key), value))
    return tuple(pairs)


async def _bad_words(words: list[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Tokenise each word as it begins a text and as it follows a space."""
    if any(not 1 <= len(word) <= 1024 for word in words):
        raise invalid("bad_words", "holds strings of 1 to 1024 characters")
    if sum(map(len, words)) > MAX_BAD_WORDS_CHARS:
        raise invalid("bad_words", f"holds at most {MAX_BAD_WORDS_CHARS} characters in all")
    banned: dict[tuple[int, ...], None] = {}
    for start in range(0, len(words), _WORDS_AT_ONCE):
        texts = [text for word in words[start : start + _WORDS_AT_ONCE] for text in (word, " " + word.lstrip())]
        banned |= dict.fromkeys(map(tuple, await model.tokenizer.encode_batch(texts)))
    return tuple(ids for ids in banned if ids)
