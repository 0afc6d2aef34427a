"""/v1/completions: a batch of prompts, each a text or token ids, answered with n texts each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from server.api.job import AnswerHead, Job, answer_id, encode_json, stream_format
from server.api.logprobs import CompletionLogprobs, prompt_logprobs
from server.api.sampling import (
    check_vocabulary,
    choice_seeds,
    grammar_of,
    grammar_param,
    sampling_params,
    text_rules,
    token_budget,
    truncated,
)
from server.errors import ApiError, InvalidRequestError
from server.generation.answer import Answer, CollectedChoice
from server.generation.choice import ChoiceDelta, TokenEntry
from server.generation.spec import GenerationSpec, ParamNames
from server.http.stream import DONE, sse
from server.schema.types import CompletionRequest
from server.text.models import ServedModel
from server.trust.identity import Identity, allowed_priority, request_salt

MAX_CHOICES: Final = 1024
"""Of one request, over all its prompts."""


async def completion_job(request: CompletionRequest, model: ServedModel, identity: Identity) -> Job:
    """Tokens and limits of every prompt. Raises ApiError."""
    prompts = request.prompts()
    num_drawn = max(request.best_of or 1, request.num_choices)
    if len(prompts) * num_drawn > MAX_CHOICES:
        message = f"A request has at most {MAX_CHOICES} choices; this one has {len(prompts)} prompts x {num_drawn}."
        raise InvalidRequestError(message, param="prompt")
    id_ = answer_id("cmpl")
    root = model.root(request_salt(identity, request.cache_salt))
    grammar = grammar_of(request.response_format, request.structured_outputs)
    params = ParamNames(prompt="prompt", grammar=grammar_param(request))
    specs: list[GenerationSpec] = []
    texts: list[str] = []
    for index, prompt in enumerate(prompts):
        prompt_ids = await _prompt_ids(prompt, request, model)
        if request.echo:
            texts.append(prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt_ids, skip_special=False))
        max_tokens = token_budget(
            model, len(prompt_ids), request.max_tokens or None, default=_default_tokens(request), param="prompt"
        )
        specs.append(
            GenerationSpec(
                request_id=id_ if len(prompts) == 1 else f"{id_}-{index}",
                model=model,
                prompt_ids=prompt_ids,
                root=root,
                seeds=choice_seeds(request.seed, num_drawn),
                sampling=sampling_params(
                    request,
                    model,
                    max_tokens=max_tokens,
                    logprobs=_num_logprobs(request, num_drawn),
                    grammar=grammar,
                    prompt_logprobs=request.logprobs if request.echo else None,
                ),
                rules=text_rules(request, model),
                params=params,
                first_index=index * num_drawn,
                priority=allowed_priority(identity, request.priority),
                tenant=identity.tag,
                affinity_key=request.prompt_cache_key,
            )
        )
    head = AnswerHead(id_, "text_completion", request.model)
    presenter = CompletionPresenter(head, request, model, texts, num_drawn)
    return Job(tuple(specs), presenter, bool(request.stream))


def _default_tokens(request: CompletionRequest) -> int:
    """With echo, max_tokens 0 asks for the prompt's own log probabilities: one token is drawn and not shown."""
    return 1 if request.max_tokens == 0 else request.token_limit


def _num_logprobs(request: CompletionRequest, num_drawn: int) -> int | None:
    return 0 if request.logprobs is None and num_drawn > request.num_choices else request.logprobs


async def _prompt_ids(prompt: str | list[int], request: CompletionRequest, model: ServedModel) -> list[int]:
    if isinstance(prompt, str):
        prompt_ids = await model.tokenizer.encode(prompt, add_bos=request.add_special_tokens is not False)
    else:
        check_vocabulary(prompt, model, "prompt")
        prompt_ids = prompt
    prompt_ids = truncated(prompt_ids, request)
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
        self._pieces = model.tokenizer.pieces
        self._echoes = echoes
        self._num_drawn = num_drawn
        self._format = stream_format(request)
        self._begun: set[int] = set()
        self._scoring = request.max_tokens == 0

    def body(self, answer: Answer, choices: Sequence[CollectedChoice]) -> bytes:
        fields = self._head.fields(answer)
        shown: list[dict[str, Any]] = []
        for prompt in range(len(answer.generations)):
            drawn = choices[prompt * self._num_drawn : (prompt + 1) * self._num_drawn]
            for choice in _best(drawn, self._request.num_choices):
                shown.append(self._choice(answer, prompt, len(shown), choice))
        fields["choices"] = shown
        fields["usage"] = self._usage(answer)
        return encode_json(fields)

    def events(self, answer: Answer, batch: Sequence[ChoiceDelta]) -> bytes:
        return b"".join([self._delta_events(answer, delta) for delta in batch])

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
        fields: dict[str, Any] = {
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

    def _delta_events(self, answer: Answer, delta: ChoiceDelta) -> bytes:
        prompt = delta.choice // self._num_drawn
        events = b""
        first = delta.choice not in self._begun
        self._begun.add(delta.choice)
        token_ids = None
        if first and self._echoes:
            echoed = self._logprobs(answer, prompt, (), echo=True)
            events = self._chunk(answer, delta.choice, self._echoes[prompt], echoed)
        shown = not self._scoring and (delta.text or delta.entries or (self._format.token_ids and delta.token_ids))
        if shown or delta.finish_reason is not None:
            text = "" if self._scoring else delta.text
            logprobs = self._logprobs(answer, prompt, delta.entries, echo=False) if delta.entries and shown else None
            if self._format.token_ids:
                token_ids = [] if self._scoring else delta.token_ids
            events += self._chunk(answer, delta.choice, text, logprobs, delta.finish_reason, token_ids)
        return events

    def _chunk(
        self,
        answer: Answer,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None,
        finish_reason: str | None = None,
        token_ids: list[int] | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if token_ids is not None:
            choice["token_ids"] = token_ids
        fields = self._head.fields(answer)
        fields["choices"] = [choice]
        if self._format.include_usage:
            fields["usage"] = self._usage(answer) if self._format.continuous_usage else None
        return sse(encode_json(fields))

    def _logprobs(
        self, answer: Answer, prompt: int, entries: Sequence[TokenEntry], *, echo: bool
    ) -> dict[str, Any] | None:
        num_top = self._request.logprobs
        if num_top is None:
            return None
        written = CompletionLogprobs(self._pieces, num_top)
        generation = answer.generations[prompt]
        if echo:
            offset = 0
            for token_id, logprobs in zip(generation.spec.prompt_ids, generation.prompt_logprobs, strict=False):
                written.add(token_id, logprobs, offset)
                offset += len(self._pieces[token_id].decode("utf-8", "ignore"))
        if not self._scoring:
            shift = len(self._echoes[prompt]) if self._echoes else 0
            for entry in entries:
                written.add(entry.token_id, entry.logprobs, entry.start + shift)
        return written.fields()


def _best(drawn: Sequence[CollectedChoice], count: int) -> Sequence[CollectedChoice]:
    """The `count` choices with the highest mean log probability."""
    if len(drawn) <= count:
        return drawn
    return sorted(drawn, key=_mean_logprob, reverse=True)[:count]


def _mean_logprob(choice: CollectedChoice) -> float:
    return sum(entry.logprobs.logprob for entry in choice.entries) / max(1, len(choice.entries))
