"""/v1/completions: a batch of prompts, each a text or token ids, answered with n texts each."""

from __future__ import annotations

import math
from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from server.api.endpoint import GenerateEndpoint, PreparedRequest
from server.api.formatting import (
    ChunkFormatter,
    LazyJson,
    encode_json,
    json_logprob,
    json_parts,
    response_id,
    token_text,
)
from server.api.prompts import params
from server.api.prompts.grammars import answer_grammar
from server.api.prompts.limits import Prompt, TokenLimits, batch_specs
from server.auth.identity import Identity
from server.http.stream import sse
from server.models.served_model import ServedModel
from server.request.choice import ChoiceDelta, GenerationSpec, TokenEntry
from server.request.request import Generation
from server.request.response import ResponseStream
from server.request_context import CURRENT, trace_stage
from server.schema.decoding import invalid
from server.schema.requests import COMPLETION, CompletionRequest, batch_of
from server.text.output_parser import OutputRules
from worker.wire import SamplingParams, TokenLogprobs

MAX_CHOICES: Final = 1024
"""The limit for all prompts of a request together."""
MAX_BATCH_FIELDS: Final = 1 << 21
"""Prompts times the ids, biases, bad words and grammar tokens that are sent with each."""
MAX_ECHOED_LOGPROBS: Final = 1 << 21
"""Prompt tokens times the log probabilities asked for of each."""


class CompletionEndpoint(GenerateEndpoint):
    route, prefix = "completions", "cmpl-"

    async def prepare(self, body: bytes, identity: Identity) -> PreparedRequest:
        with trace_stage("validate"):
            request = await COMPLETION.read(body, self._models.batch_text_limit)
            model = self._model(request.model, identity)
            CURRENT.get().ignore(request.ignored_hints)
        with trace_stage("tokenise"):
            return await self._tokenised(request, model, identity)

    async def _tokenised(self, request: CompletionRequest, model: ServedModel, identity: Identity) -> PreparedRequest:
        """Tokenise every prompt and apply its limits. Raises ApiError."""
        prompts = batch_of(request.prompt, "prompt")
        num_sampled = max(request.best_of or 1, request.num_choices)
        constraint = await answer_grammar(request.response_format, request.structured_outputs)
        tops = (request.prompt_logprobs, request.logprobs if request.echo else None)
        sampling = SamplingParams(
            max_tokens=request.token_limit,
            logprobs=0 if request.logprobs is None and num_sampled > request.num_choices else request.logprobs,
            prompt_logprobs=max((num_top for num_top in tops if num_top is not None), default=None),
            grammar=constraint.grammar,
        )
        sampling = await params.with_sampling(sampling, request, model, num_sampled)
        _check_batch(sampling, len(prompts), num_sampled)
        clamps = self._services.config.clamp_max_tokens or request.max_tokens is None
        limits = TokenLimits(request, "prompt", max_tokens=request.token_limit, clamps=clamps)
        shared = replace(
            params.new_spec(response_id(self.prefix), model, identity, request, "prompt"),
            seeds=params.choice_seeds(request.seed, num_sampled),
            sampling=sampling,
            rules=params.text_rules(request, request.stop_strings, model, OutputRules()),
            grammar_param=constraint.param,
            relaxed=constraint.relaxed,
            clamps_max_tokens=clamps,
        )
        echoes: list[str] = []

        async def encode(prompt: Prompt) -> Sequence[int]:
            if isinstance(prompt, str):
                return await limits.prompt_tokens(prompt, model, add_bos=request.add_special_tokens is not False)
            params.in_vocabulary(prompt, model.bundle.vocab_size, "prompt")
            return limits.truncated(prompt)

        specs = []
        async for spec, prompt, num_tokens_so_far in batch_specs(shared, prompts, encode):
            _check_logprobs(num_tokens_so_far, sampling, model)
            if request.echo:
                echoes.append(prompt if isinstance(prompt, str) else model.tokenizer.decode(spec.prompt_ids))
            own = replace(sampling, max_tokens=limits.token_budget(model, len(spec.prompt_ids)))
            specs.append(replace(spec, sampling=own, seeds=params.choice_seeds(request.seed, num_sampled)))
        formatter = CompletionFormatter(request, shared, echoes, num_sampled)
        return PreparedRequest(tuple(specs), formatter, bool(request.stream))


def _check_batch(params: SamplingParams, num_prompts: int, num_sampled: int) -> None:
    """Raises InvalidRequestError for too many choices, and for fields too large to be sent with every prompt."""
    if num_prompts * num_sampled > MAX_CHOICES:
        raise invalid("prompt", f"has {num_prompts} texts x {num_sampled} choices, at most {MAX_CHOICES} are taken")
    size = len(params.allowed_token_ids or ()) + len(params.logit_bias) + sum(map(len, params.bad_words))
    size += len(params.grammar.text) // 4 if params.grammar is not None else 0
    if num_prompts > 1 and size * num_prompts > MAX_BATCH_FIELDS:
        fields = "allowed_token_ids, logit_bias, bad_words and grammars"
        raise invalid("prompt", f"has {num_prompts} texts, too many for {fields}, which go along with each")


def _check_logprobs(num_tokens_so_far: int, params: SamplingParams, model: ServedModel) -> None:
    """Raises InvalidRequestError when the prompts so far ask for too many log probabilities."""
    num_asked = 0 if params.prompt_logprobs is None else params.prompt_logprobs + 1
    if num_tokens_so_far * num_asked > max(MAX_ECHOED_LOGPROBS, model.max_model_len * num_asked):
        why = f"gives at most {MAX_ECHOED_LOGPROBS} values for prompts: ask for fewer, or send several requests"
        raise invalid("logprobs", why)


class CompletionFormatter(ChunkFormatter):
    """Completion shapes. `num_sampled` choices were generated per prompt; the best n are shown."""

    prompt_per_choice = True

    def __init__(self, request: CompletionRequest, spec: GenerationSpec, echoes: list[str], num_sampled: int) -> None:
        super().__init__("text_completion", request, spec, request.logprobs)
        self._num_shown = request.num_choices
        self._echoes = echoes
        self._num_sampled = num_sampled
        self._begun: set[int] = set()
        self.shows_output = request.max_tokens != 0
        """False: only the prompt's log probabilities are asked for."""

    def events(self, response: ResponseStream, deltas: Sequence[ChoiceDelta]) -> bytes | Iterator[bytes]:
        parts = (part for delta in deltas for part in self._delta_events(response, self._shown(delta)))
        return parts if self._echoes and self._num_top is not None else b"".join(parts)

    def _shown(self, delta: ChoiceDelta) -> ChoiceDelta:
        """Return the output as the client asked for it: without the one token that a worker samples at least."""
        return delta if self.shows_output else ChoiceDelta(delta.choice, "", [], [], delta.finish_reason and "length")

    def _usage(self, response: ResponseStream) -> dict[str, Any]:
        usage = response.usage()
        if not self.shows_output:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _choices(self, response: ResponseStream, choices: Sequence[ChoiceDelta]) -> Iterator[dict[str, Any]]:
        for prompt, generation in enumerate(response.generations):
            sampled = choices[prompt * self._num_sampled : (prompt + 1) * self._num_sampled]
            if len(sampled) > self._num_shown:
                sampled = sorted(sampled, key=_mean_logprob, reverse=True)[: self._num_shown]
            echo = self._echoes[prompt] if self._echoes else ""
            for rank, choice in enumerate(map(self._shown, sampled)):
                fields = self._whole_choice(
                    choice,
                    index=prompt * self._num_shown + rank,
                    text=echo + choice.text,
                    logprobs=self._logprobs(response, prompt, choice.entries, echo=bool(self._echoes)),
                    finish_reason=choice.finish_reason,
                )
                self._add_prompt(fields, generation)
                yield fields

    def _delta_events(self, response: ResponseStream, delta: ChoiceDelta) -> Iterator[bytes]:
        index, prompt = delta.choice, delta.choice // self._num_sampled
        first: dict[str, Any] = {}
        if index not in self._begun:
            self._begun.add(index)
            if self._token_ids:
                first["prompt_token_ids"] = list(response.generations[prompt].spec.prompt_ids)
            if self._echoes:
                logprobs = self._logprobs(response, prompt, (), echo=True)
                yield from self._chunk(response, index=index, text=self._echoes[prompt], logprobs=logprobs, **first)
                first = {}
        text, entries, token_ids = delta.text, delta.entries, delta.token_ids
        if text or entries or first or (self._token_ids and token_ids) or delta.finish_reason is not None:
            logprobs = self._logprobs(response, prompt, entries, echo=False) if entries else None
            choice = LazyJson(index=index, text=text, logprobs=logprobs, finish_reason=delta.finish_reason)
            if self._token_ids:
                choice["token_ids"] = token_ids
            yield from self._chunk(response, **choice, **first)

    def _chunk(self, response: ResponseStream, *, logprobs: LazyJson | None, **fields: Any) -> Iterator[bytes]:
        choice = LazyJson(logprobs=logprobs, finish_reason=None) | fields
        if logprobs is None:
            yield sse(encode_json(self._chunk_fields(response, [choice])))
        else:
            yield b"data: "
            yield from json_parts(LazyJson(self._chunk_fields(response, iter((LazyJson(choice),)))))
            yield b"\n\n"

    def _logprobs(
        self, response: ResponseStream, prompt: int, entries: Sequence[TokenEntry], *, echo: bool
    ) -> LazyJson | None:
        """Return four lists with an item per token: the prompt's tokens if `echo`, then the entries."""
        if self._num_top is None:
            return None
        rows = partial(self._rows, response.generations[prompt], prompt, entries, echo)
        return LazyJson(
            text_offset=(offset for _, _, offset in rows()),
            token_logprobs=(None if scored is None else json_logprob(scored.logprob) for _, scored, _ in rows()),
            tokens=(token_text(self._token_bytes, token_id) for token_id, _, _ in rows()),
            top_logprobs=(self._top_logprobs(token_id, scored) for token_id, scored, _ in rows()),
        )

    def _rows(
        self, generation: Generation, prompt: int, entries: Sequence[TokenEntry], echo: bool
    ) -> Iterator[tuple[int, TokenLogprobs | None, int]]:
        """Yield each token's id, log probabilities (None for a prompt's first), and offset in the text; a BOS has 0."""
        if echo:
            ids, decoder = generation.spec.prompt_ids, getincrementaldecoder("utf-8")("ignore")
            head = b"".join([self._token_bytes[id_] for id_ in ids[:8]]).decode(errors="ignore")  # a BOS, or a space
            offset = -next((n for n in range(len(head)) if self._echoes[prompt].startswith(head[n:])), 0)
            for token_id, logprobs in zip(ids, generation.prompt_logprobs, strict=False):
                yield token_id, logprobs, max(0, offset)
                offset += len(decoder.decode(self._token_bytes[token_id]))
        shift = len(self._echoes[prompt]) if self._echoes else 0
        for entry in entries:
            yield entry.token_id, entry.logprobs, entry.start + shift

    def _top_logprobs(self, token_id: int, logprobs: TokenLogprobs | None) -> dict[str, float] | None:
        if logprobs is None:
            return None
        ranked = (*logprobs.top[: self._num_top], (token_id, logprobs.logprob))
        return {self._distinct_text(id_): json_logprob(value) for id_, value in ranked}

    def _distinct_text(self, token_id: int) -> str:
        """Return a token's text as a key, or its bytes if they are not valid UTF-8."""
        token_bytes = self._token_bytes[token_id]
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def _mean_logprob(choice: ChoiceDelta) -> float:
    """Return what `best_of` ranks a choice by. One without tokens comes last."""
    scores = [entry.logprobs.logprob for entry in choice.entries]
    return sum(scores) / len(scores) if scores else -math.inf
