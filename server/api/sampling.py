"""Turn a checked body into the worker's sampling parameters: the fields that need the model's vocabulary and limits."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, Final

import msgspec

from server.errors import ContextLengthError, InvalidRequestError
from server.event_loop import rested
from server.models import ServedModel
from server.schema.decoding import invalid
from server.schema.fields import ResponseFormat, SamplingFields, StructuredOutputs
from server.text.detokenizer import TextRules
from server.text.tokenizer import TooManyTokensError
from worker.wire import Grammar, SamplingParams, too_many_ids

MAX_BAD_WORDS_CHARS: Final = 1 << 18
"""The limit for all bad words of a request together."""
MAX_SCHEMA_BYTES: Final = 1 << 20
"""The limit for a schema, or for all tools: templates and grammars write them in one go."""
MAX_KWARGS_BYTES: Final = 1 << 16
"""The limit for chat_template_kwargs, as JSON."""
TEXT_ROOM: Final = 4
"""The limit, in contexts, for a text that will be cut to `truncate_prompt_tokens`."""
_WORDS_AT_ONCE: Final = 16
_SAME_FIELDS: Final = (
    *("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("min_tokens", "ignore_eos"),
)
"""The fields that a worker takes as the client gives them, with the same defaults."""
_SEED_MASK: Final = 2**63 - 1


def choice_seeds(seed: int | None, num_choices: int) -> tuple[int, ...]:
    """Give choice 0 the request's seed, and choice i a hash of it and i; draw one when the request has none."""
    first = (int.from_bytes(os.urandom(8)) if seed is None else seed) & _SEED_MASK
    seeds = [first]
    for index in range(1, num_choices):
        both = first.to_bytes(8, "little") + index.to_bytes(4, "little")
        digest = blake2b(both, digest_size=8, person=b"headstart-seed")
        seeds.append(int.from_bytes(digest.digest(), "little") & _SEED_MASK)
    return tuple(seeds)


async def prompt_tokens(
    text: str,
    request: SamplingFields,
    model: ServedModel,
    *,
    add_bos: bool = False,
    client_offsets: Sequence[int] | None = None,
) -> list[int]:
    """Tokenise a prompt, and cut it if the request says so. Raises ContextLengthError as soon as it cannot fit.

    `client_offsets`: see `Tokenizer.encode`.
    """
    keep = request.truncate_prompt_tokens
    room = model.max_model_len if keep is None else TEXT_ROOM * model.max_model_len
    longest = model.prompt_bytes
    if longest is not None and len(text) > TEXT_ROOM * longest:
        message = f"your prompt has {len(text)} characters, and {TEXT_ROOM * longest} at most are read"
        raise ContextLengthError(message, model.max_model_len, param=request.text_field)
    try:
        ids = await model.tokenizer.encode(text, add_bos=add_bos, client_offsets=client_offsets, room=room)
    except TooManyTokensError as error:
        if keep is None:
            raise _too_long(request, model, f"at least {error.at_least}") from None
        message = f"your prompt, which is to be truncated, resulted in more than {room} tokens"
        raise ContextLengthError(message, model.max_model_len, param=request.text_field) from None
    return truncated(ids, request)


def truncated(prompt_ids: list[int], request: SamplingFields) -> list[int]:
    """Apply `truncate_prompt_tokens`: keep the last so many tokens, or the first with truncation_side `right`."""
    keep = request.truncate_prompt_tokens
    if keep is None or len(prompt_ids) <= keep:
        return prompt_ids
    return prompt_ids[:keep] if request.truncation_side == "right" else prompt_ids[-keep:]


def token_budget(request: SamplingFields, model: ServedModel, num_prompt_tokens: int) -> int:
    """Return how many tokens may be generated. Raises InvalidRequestError for an empty prompt, or one too long."""
    if not num_prompt_tokens:
        raise invalid(request.text_field, "must not be empty")
    limit, default = request.token_limit, request.default_tokens
    room = model.max_model_len - num_prompt_tokens
    if room < 1 or (limit is not None and limit > room):
        raise _too_long(request, model, str(num_prompt_tokens))
    if limit is None:
        limit = room if default is None else min(default, room)
    if request.min_tokens is not None and request.min_tokens > limit:
        raise invalid("min_tokens", "must not be above max_tokens")
    return limit


def _too_long(request: SamplingFields, model: ServedModel, num_prompt_tokens: str) -> ContextLengthError:
    what, asked = "messages" if request.text_field == "messages" else "prompt", request.token_limit
    message = f"your {what} resulted in {num_prompt_tokens} tokens"
    if asked is not None and num_prompt_tokens.isdecimal():
        total = int(num_prompt_tokens) + asked
        message = f"you requested {total} tokens ({num_prompt_tokens} in the {what}, {asked} in the completion)"
    return ContextLengthError(message, model.max_model_len, param=request.text_field)


async def sampling_params(
    request: SamplingFields,
    model: ServedModel,
    *,
    max_tokens: int,
    logprobs: int | None,
    grammar: Grammar | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Raises InvalidRequestError."""
    vocab_size = model.bundle.vocab_size
    allowed = request.allowed_token_ids
    params = SamplingParams(
        max_tokens=max_tokens,
        top_k=max(0, request.top_k or 0),
        logit_bias=await _logit_bias(request.logit_bias, vocab_size) if request.logit_bias else (),
        bad_words=await _bad_words(request.bad_words, model) if request.bad_words else (),
        allowed_token_ids=in_vocabulary(dict.fromkeys(allowed), vocab_size, "allowed_token_ids") if allowed else None,
        stop_token_ids=in_vocabulary(request.stop_token_ids or (), vocab_size, "stop_token_ids"),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs if prompt_logprobs is not None else request.prompt_logprobs,
        grammar=grammar,
        **{name: value for name in _SAME_FIELDS if (value := getattr(request, name)) is not None},
    )
    lists = (allowed, request.logit_bias, request.bad_words, request.stop_token_ids)
    if any(lists) and (problem := too_many_ids(params, request.num_choices)) is not None:
        raise InvalidRequestError(f"{problem}.", param=problem.partition(":")[0].partition(",")[0])
    return params


def text_rules(request: SamplingFields, model: ServedModel, markers: Sequence[str] = ()) -> TextRules:
    """Return how tokens become text. `markers`: special tokens that a parser has to see."""
    terminal = frozenset(request.stop_token_ids or ())
    return TextRules(
        stops=request.stop_strings,
        include_stop=bool(request.include_stop_str_in_output),
        skip_special=request.skip_special_tokens is not False,
        terminal_ids=terminal if request.ignore_eos else terminal | model.tokenizer.eos_ids,
        shown_ids=frozenset(id_ for marker in markers if (id_ := model.tokenizer.token_id(marker)) is not None),
    )


def grammar_of(formatted: ResponseFormat | None, structured: StructuredOutputs | None) -> Grammar | None:
    """Return the constraint on the output; at most one of both is given."""
    if formatted is not None and (given := formatted.given_schema) is not None:
        field, schema = given
        return Grammar("json_schema", _json(schema, f"response_format.{field}"))
    if formatted is not None and formatted.type == "json_object":
        return Grammar("json_object", "")
    if structured is None:
        return None
    [name] = structured.given()
    kind: Any = "json_schema" if name == "json" else name
    text = "" if kind == "json_object" else _json(getattr(structured, name))
    return Grammar(kind, text, bool(structured.disable_any_whitespace))


def grammar_param(request: SamplingFields) -> str:
    """Name the field that an error of the request's grammar is about."""
    return "response_format" if request.structured_outputs is None else "structured_outputs"


def _json(value: object, param: str = "structured_outputs") -> str:
    """Write a value as JSON; a string is JSON already. Raises InvalidRequestError."""
    written = value if isinstance(value, str) else msgspec.json.encode(value)
    if len(written) <= 4 * MAX_SCHEMA_BYTES:  # a character takes up to four bytes
        text = written if isinstance(written, str) else written.decode()
    if len(written) > 4 * MAX_SCHEMA_BYTES or len(text) > MAX_SCHEMA_BYTES:
        raise invalid(param, f"takes at most {MAX_SCHEMA_BYTES} characters of JSON")
    return text


async def _logit_bias(bias: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    async for key, value in rested(bias.items()):
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


def in_vocabulary(token_ids: Iterable[int], vocab_size: int, param: str) -> tuple[int, ...]:
    """Return the ids. Raises InvalidRequestError for one that no token has."""
    ids = tuple(token_ids)
    if ids and max(ids) >= vocab_size:
        raise invalid(param, f"has token ids from 0 to {vocab_size - 1}, got {next(i for i in ids if i >= vocab_size)}")
    return ids
