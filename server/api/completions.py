"""/v1/completions: a batch of prompts, each a text or token ids, answered with n texts each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from msgspec.structs import replace

from server.api.job import AnswerHead, Job, Spread, answer_id, encode_json, json_parts, stream_format
from server.api.logprobs import Row, completion_logprobs, prompt_logprobs
from server.api.sampling import (
    check_min_tokens,
    check_vocabulary,
    choice_seeds,
    grammar_of,
    grammar_param,
    prompt_tokens,
    sampling_params,
    text_rules,
    token_budget,
    truncated,
)
from server.auth.identity import Identity, allowed_priority, request_salt
from server.errors import ApiError, InvalidRequestError
from server.http.stream import DONE, sse
from server.models import ServedModel
from server.pace import Pace
from server.request.answer import Answer, CollectedChoice
from server.request.choice import ChoiceDelta, TokenEntry
from server.request.spec import GenerationSpec, ParamNames
from server.schema.types import CompletionRequest
from worker.wire import SamplingParams

MAX_CHOICES: Final = 1024
"""Of one request, over all its prompts."""
MAX_BATCH_TOKENS: Final = 1 << 20
"""Of the prompts of one request, or one context if that is more."""
MAX_BATCH_FIELDS: Final = 1 << 21
"""Prompts times what each of them takes along to its worker: ids, biases and bad words, whose tokens count."""
MAX_ECHOED_LOGPROBS: Final = 1 << 21
"""Prompt tokens times the log probabilities asked for of each."""


async def completion_job(request: CompletionRequest, model: ServedModel, identity: Identity) -> Job:
    """Tokens and limits of every prompt. Raises ApiError."""
    prompts = request.prompts()
    num_drawn = max(request.best_of or 1, request.num_choices)
    if len(prompts) * num_drawn > MAX_CHOICES:
        message = f"A request has at most {MAX_CHOICES} choices; this one has {len(prompts)} prompts x {num_drawn}."
        raise InvalidRequestError(message, param="prompt")
    id_ = answer_id("cmpl")
    root = model.root(request_salt(identity, request.cache_salt))
    params = ParamNames(prompt="prompt", grammar=grammar_param(request))
    sampling = await sampling_params(
        request,
        model,
        max_tokens=request.max_tokens or _default_tokens(request),
        logprobs=_num_logprobs(request, num_drawn),
        grammar=grammar_of(request.response_format, request.structured_outputs),
        prompt_logprobs=request.logprobs if request.echo else None,
    )
    _check_fields(sampling, len(prompts))
    rules = text_rules(request, model)
    specs: list[GenerationSpec] = []
    texts: list[str] = []
    pace = Pace()
    num_tokens = 0
    for index, prompt in enumerate(prompts):
        prompt_ids = await _prompt_ids(prompt, request, model)
        num_tokens += len(prompt_ids)
        _check_batch(num_tokens, sampling, model)
        if request.echo:
            texts.append(prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt_ids, skip_special=False))
        max_tokens = token_budget(
            model, len(prompt_ids), request.max_tokens or None, default=_default_tokens(request), param="prompt"
        )
        if request.min_tokens is not None:
            check_min_tokens(request.min_tokens, max_tokens)
        specs.append(
            GenerationSpec(
                request_id=id_ if len(prompts) == 1 else f"{id_}-{index}",
                model=model,
                prompt_ids=prompt_ids,
                root=root,
                seeds=choice_seeds(request.seed, num_drawn),
                sampling=sampling if max_tokens == sampling.max_tokens else replace(sampling, max_tokens=max_tokens),
                rules=rules,
                params=params,
                first_index=index * num_drawn,
                priority=allowed_priority(identity, request.priority),
                tenant=identity.tag,
                affinity_key=request.prompt_cache_key,
            )
        )
        await pace.rest()
    head = AnswerHead(id_, "text_completion", request.model)
    presenter = CompletionPresenter(head, request, model, texts, num_drawn)
    return Job(tuple(specs), presenter, bool(request.stream))


def _check_fields(sampling: SamplingParams, num_prompts: int) -> None:
    """Raises InvalidRequestError for what is small once, and large with every prompt."""
    size = len(sampling.allowed_token_ids or ()) + len(sampling.logit_bias) + sum(map(len, sampling.bad_words))
    size += len(sampling.grammar.text) // 4 if sampling.grammar is not None else 0
    if num_prompts > 1 and size * num_prompts > MAX_BATCH_FIELDS:
        message = "allowed_token_ids, logit_bias, bad_words and grammars go along with every prompt: "
        raise InvalidRequestError(f"{message}{num_prompts} prompts are too many for these.", param="prompt")


def _check_batch(num_tokens: int, sampling: SamplingParams, model: ServedModel) -> None:
    """Raises InvalidRequestError when the prompts up to here have too many tokens."""
    limit = max(MAX_BATCH_TOKENS, model.max_model_len)
    if num_tokens > limit:
        message = f"The prompts of a request have at most {limit} tokens in all: send several requests."
        raise InvalidRequestError(message, param="prompt")
    num_asked = 0 if sampling.prompt_logprobs is None else sampling.prompt_logprobs + 1
    if num_tokens * num_asked > max(MAX_ECHOED_LOGPROBS, model.max_model_len * num_asked):
        message = f"At most {MAX_ECHOED_LOGPROBS} log probabilities of prompts are given in one answer: ask for fewer "
        raise InvalidRequestError(f"{message}of each token, or send several requests.", param="logprobs")


def _default_tokens(request: CompletionRequest) -> int:
    """With echo, max_tokens 0 asks for the prompt's own log probabilities: one token is drawn and not shown."""
    return 1 if request.max_tokens == 0 else request.token_limit


def _num_logprobs(request: CompletionRequest, num_drawn: int) -> int | None:
    return 0 if request.logprobs is None and num_drawn > request.num_choices else request.logprobs


async def _prompt_ids(prompt: str | list[int], request: CompletionRequest, model: ServedModel) -> list[int]:
    if isinstance(prompt, str):
        add_bos, limit = request.add_special_tokens is not False, request.max_tokens or None
        prompt_ids = await prompt_tokens(prompt, request, model, limit=limit, param="prompt", add_bos=add_bos)
    else:
        check_vocabulary(prompt, model, "prompt")
        prompt_ids = truncated(prompt, request)
    if not prompt_ids:
        raise InvalidRequestError("The prompt is empty.", param="prompt")
    return prompt_ids


class CompletionPresenter:
    """Completion shapes. `num_drawn` choices were generated a prompt, the best n of them are shown."""

    def __init__(
        self, head: AnswerHead, request: CompletionRequest, model: ServedModel, echoes: list[str], num_drawn: int
    ) -> None:
        self._head = head
        self._request = request
        self._pieces = model.tokenizer.token_bytes
        self._echoes = echoes
        self._num_drawn = num_drawn
        self._format = stream_format(request)
        self._begun: set[int] = set()
        self._scoring = request.max_tokens == 0

    def body(self, answer: Answer, choices: Sequence[CollectedChoice]) -> Iterator[bytes]:
        fields = Spread(self._head.fields(answer))
        fields["choices"] = self._choices(answer, choices)
        fields["usage"] = self._usage(answer)
        return json_parts(fields)

    def _choices(self, answer: Answer, choices: Sequence[CollectedChoice]) -> Iterator[dict[str, Any]]:
        num_shown = 0
        for prompt in range(len(answer.generations)):
            drawn = choices[prompt * self._num_drawn : (prompt + 1) * self._num_drawn]
            for choice in _best(drawn, self._request.num_choices):
                yield self._choice(answer, prompt, num_shown, choice)
                num_shown += 1

    def events(self, answer: Answer, batch: Sequence[ChoiceDelta]) -> bytes | Iterator[bytes]:
        parts = (part for delta in batch for part in self._delta_events(answer, delta))
        return parts if self._echoes and self._request.logprobs is not None else b"".join(parts)

    def last_events(self, answer: Answer) -> bytes:
        if not self._format.include_usage:
            return DONE
        fields = self._head.fields(answer)
        fields["choices"] = []
        fields["usage"] = self._usage(answer)
        return sse(encode_json(fields)) + DONE

    def error_event(self, error: ApiError) -> bytes:
        return sse(encode_json({"error": error.fields()}))

    def _usage(self, answer: Answer) -> dict[str, Any]:
        usage = answer.usage()
        if self._scoring:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _choice(self, answer: Answer, prompt: int, index: int, choice: CollectedChoice) -> dict[str, Any]:
        spec = answer.generations[prompt].spec
        echo = self._echoes[prompt] if self._echoes else ""
        fields = Spread() if self._request.logprobs is not None or self._request.prompt_logprobs is not None else {}
        fields |= {
            "index": index,
            "text": echo if self._scoring else echo + choice.text,
            "logprobs": self._logprobs(answer, prompt, choice.entries, echo=bool(self._echoes)),
            "finish_reason": choice.finish_reason,
        }
        if choice.stop_reason is not None:
            fields["stop_reason"] = choice.stop_reason
        if self._request.prompt_logprobs is not None:
            positions = answer.generations[prompt].prompt_logprobs
            num_top = self._request.prompt_logprobs
            fields["prompt_logprobs"] = prompt_logprobs(self._pieces, spec.prompt_ids, positions, num_top)
        if self._format.token_ids:
            fields["token_ids"] = [] if self._scoring else choice.token_ids
            fields["prompt_token_ids"] = list(spec.prompt_ids)
        return fields

    def _delta_events(self, answer: Answer, delta: ChoiceDelta) -> Iterator[bytes]:
        prompt = delta.choice // self._num_drawn
        first = delta.choice not in self._begun
        self._begun.add(delta.choice)
        token_ids = None
        if first and self._echoes:
            echoed = self._logprobs(answer, prompt, (), echo=True)
            yield from self._chunk(answer, delta.choice, self._echoes[prompt], echoed)
        shown = not self._scoring and (delta.text or delta.entries or (self._format.token_ids and delta.token_ids))
        if shown or delta.finish_reason is not None:
            text = "" if self._scoring else delta.text
            logprobs = self._logprobs(answer, prompt, delta.entries, echo=False) if delta.entries and shown else None
            if self._format.token_ids:
                token_ids = [] if self._scoring else delta.token_ids
            yield from self._chunk(answer, delta.choice, text, logprobs, delta.finish_reason, token_ids)

    def _chunk(
        self,
        answer: Answer,
        index: int,
        text: str,
        logprobs: Spread | None,
        finish_reason: str | None = None,
        token_ids: list[int] | None = None,
    ) -> Iterator[bytes]:
        choice: dict[str, Any] = {} if logprobs is None else Spread()
        choice |= {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if token_ids is not None:
            choice["token_ids"] = token_ids
        fields = self._head.fields(answer)
        fields["choices"] = [choice] if logprobs is None else iter((choice,))
        if self._format.include_usage:
            fields["usage"] = self._usage(answer) if self._format.continuous_usage else None
        if logprobs is None:
            yield sse(encode_json(fields))
        else:
            yield b"data: "
            yield from json_parts(Spread(fields))
            yield b"\n\n"

    def _logprobs(self, answer: Answer, prompt: int, entries: Sequence[TokenEntry], *, echo: bool) -> Spread | None:
        num_top = self._request.logprobs
        if num_top is None:
            return None

        def rows() -> Iterator[Row]:
            generation = answer.generations[prompt]
            if echo:
                offset = 0
                for token_id, logprobs in zip(generation.spec.prompt_ids, generation.prompt_logprobs, strict=False):
                    yield Row(token_id, logprobs, offset)
                    offset += len(self._pieces[token_id].decode("utf-8", "ignore"))
            if not self._scoring:
                shift = len(self._echoes[prompt]) if self._echoes else 0
                for entry in entries:
                    yield Row(entry.token_id, entry.logprobs, entry.start + shift)

        return completion_logprobs(self._pieces, num_top, rows)


def _best(drawn: Sequence[CollectedChoice], count: int) -> Sequence[CollectedChoice]:
    """The `count` choices with the highest mean log probability."""
    if len(drawn) <= count:
        return drawn
    return sorted(drawn, key=_mean_logprob, reverse=True)[:count]


def _mean_logprob(choice: CollectedChoice) -> float:
    return sum(entry.logprobs.logprob for entry in choice.entries) / max(1, len(choice.entries))
