"""/v1/chat/completions: a checked body becomes a job, and the job's deltas become chat chunks or one answer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from server.api.job import AnswerHead, Job, Spread, answer_id, encode_json, json_parts, stream_format
from server.api.logprobs import chat_logprobs, prompt_logprobs
from server.api.sampling import (
    MAX_SCHEMA_BYTES,
    TEXT_ROOM,
    choice_seeds,
    prompt_tokens,
    sampling_params,
    text_rules,
    token_budget,
)
from server.api.tools import chat_grammar, output_rules
from server.auth.identity import Identity, allowed_priority, request_salt
from server.errors import ApiError, ContextLengthError, InvalidRequestError
from server.http.stream import DONE, sse
from server.models import ServedModel
from server.request.answer import Answer, CollectedChoice
from server.request.choice import ChoiceDelta, TokenEntry
from server.request.spec import GenerationSpec, ParamNames
from server.schema.types import ChatRequest
from server.text.control_tokens import RenderedPrompt
from server.text.parsing.messages import END_THINK, ChoiceMessage, OutputRules

_SAME_NAMES: Final[Mapping[str, str]] = MappingProxyType({})


async def chat_job(request: ChatRequest, model: ServedModel, identity: Identity) -> Job:
    """Raises ApiError."""
    spec, rules = await chat_spec(request, model, identity, answer_id("chatcmpl"))
    kind = "chat.completion.chunk" if request.stream else "chat.completion"
    head = AnswerHead(spec.request_id, kind, request.model)
    return Job((spec,), ChatPresenter(head, request, model, rules), bool(request.stream))


async def chat_spec(
    request: ChatRequest, model: ServedModel, identity: Identity, id_: str, field_names: Mapping[str, str] = _SAME_NAMES
) -> tuple[GenerationSpec, OutputRules]:
    """Template, tokens and limits. `field_names`: what fields are called in the body, where not as here.

    Raises ApiError.
    """
    rendered = await render_chat(request, model)
    text = rendered.text
    prompt_ids = await prompt_tokens(
        text,
        request,
        model,
        limit=request.token_limit,
        param="messages",
        client_offsets=client_offsets(rendered, model),
    )
    if not prompt_ids:
        raise InvalidRequestError("The messages make an empty prompt.", param="messages")
    max_tokens = token_budget(model, len(prompt_ids), request.token_limit, default=None, param="messages")
    num_top = (request.top_logprobs or 0) if request.logprobs else None
    rules = output_rules(request, model, text)
    grammar, blamed = chat_grammar(request, model)
    spec = GenerationSpec(
        request_id=id_,
        model=model,
        prompt_ids=prompt_ids,
        root=model.root(request_salt(identity, request.cache_salt)),
        seeds=choice_seeds(request.seed, request.num_choices),
        sampling=await sampling_params(request, model, max_tokens=max_tokens, logprobs=num_top, grammar=grammar),
        rules=text_rules(request, model, rules.markers()),
        params=ParamNames(prompt=field_names.get("messages", "messages"), grammar=field_names.get(blamed, blamed)),
        priority=allowed_priority(identity, request.priority),
        tenant=identity.tag,
        affinity_key=request.prompt_cache_key,
        end_of_thought_id=None if rules.reasoning == "none" else model.tokenizer.token_id(END_THINK),
    )
    return spec, rules


def client_offsets(rendered: RenderedPrompt, model: ServedModel) -> Collection[int] | None:
    """Where control tokens of clients are text; None where they are control tokens."""
    return None if model.allows_control_tokens else rendered.client_offsets


async def render_chat(request: ChatRequest, model: ServedModel) -> RenderedPrompt:
    """The prompt's text, in slices. Raises InvalidRequestError."""
    if model.template is None:
        message = "This model has no chat template: use /v1/completions."
        raise InvalidRequestError(message, param="messages")
    if request.tools and len(encode_json(request.tools)) > MAX_SCHEMA_BYTES:
        raise InvalidRequestError(f"tools take at most {MAX_SCHEMA_BYTES} bytes of JSON.", param="tools")
    longest = model.prompt_bytes
    if longest is not None and (count := num_chars(request)) > TEXT_ROOM * longest:
        message = f"The messages hold {count} characters, and {TEXT_ROOM * longest} at most are taken for this model"
        raise ContextLengthError(f"{message}: send less of the conversation.", param="messages")
    return await model.template.render_in_slices(request, model.tokenizer.executor)


def num_chars(request: ChatRequest) -> int:
    """How much text there is to render."""
    total = 0
    for message in request.messages:
        content = message.content
        if isinstance(content, str):
            total += len(content)
        elif content is not None:
            total += sum(len(part.text or part.refusal or "") for part in content)
        total += len(message.reasoning_content or message.reasoning or "")
        for call in message.tool_calls or ():
            total += len(call.function.arguments) + len(call.function.name)
        if message.function_call is not None:
            total += len(message.function_call.arguments)
    return total


class ChatPresenter:
    """Chat shapes. Source: the OpenAI specification's CreateChatCompletionResponse and its stream twin."""

    def __init__(self, head: AnswerHead, request: ChatRequest, model: ServedModel, rules: OutputRules) -> None:
        self._head = head
        self._pieces = model.tokenizer.token_bytes
        self._num_top = (request.top_logprobs or 0) if request.logprobs else None
        self._num_prompt_logprobs = request.prompt_logprobs
        self._tier = "default" if request.service_tier is not None else None
        self._format = stream_format(request)
        self._rules = rules
        self._messages: dict[int, ChoiceMessage] = {}
        self._begun: set[int] = set()
        self._prefix = b""
        annotated = self._num_top is not None or self._format.continuous_usage or self._format.token_ids
        self._plain = rules.plain and not annotated
        self._usage_tail = b',"usage":null}\n\n' if self._format.include_usage else b"}\n\n"

    def body(self, answer: Answer, choices: Sequence[CollectedChoice]) -> Iterator[bytes]:
        fields = Spread(self._fields(answer))
        fields["choices"] = (self._choice(choice) for choice in choices)
        fields["usage"] = answer.usage()
        spec = answer.first.spec
        if self._num_prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(
                self._pieces, spec.prompt_ids, answer.first.prompt_logprobs, self._num_prompt_logprobs
            )
        if self._format.token_ids:
            fields["prompt_token_ids"] = list(spec.prompt_ids)
        return json_parts(fields)

    def events(self, answer: Answer, batch: Sequence[ChoiceDelta]) -> bytes:
        if not self._prefix:
            head = encode_json(self._fields(answer))
            self._prefix = b"data: " + head[:-1] + b',"choices":[{"index":'
        return b"".join([self._delta_events(answer, delta) for delta in batch])

    def last_events(self, answer: Answer) -> bytes:
        if not self._format.include_usage:
            return DONE
        fields = self._fields(answer)
        fields["choices"] = []
        fields["usage"] = answer.usage()
        return sse(encode_json(fields)) + DONE

    def error_event(self, error: ApiError) -> bytes:
        return sse(encode_json({"error": error.fields()}))

    def _delta_events(self, answer: Answer, delta: ChoiceDelta) -> bytes:
        events = b""
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            first = {"role": "assistant", "content": ""}
            extra: dict[str, Any] = {}
            if self._format.token_ids and delta.choice == 0:
                extra["prompt_token_ids"] = list(answer.first.spec.prompt_ids)
            events = self._chunk(answer, delta.choice, first, extra=extra)
        if self._plain:
            if delta.text:
                events += self._prefix + b'%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}]%b' % (
                    delta.choice,
                    encode_json(delta.text),
                    self._usage_tail,
                )
        else:
            events += self._parsed_events(answer, delta)
        if delta.finish_reason is not None:
            events += self._chunk(answer, delta.choice, {}, finish_reason=self._finish_reason(delta))
        return events

    def _parsed_events(self, answer: Answer, delta: ChoiceDelta) -> bytes:
        """Log probabilities and token ids go with the first of the deltas that one text gives."""
        message = self._message(delta.choice)
        deltas = message.deltas(delta.text, last=delta.finish_reason is not None)
        if not deltas and (delta.entries or (self._format.token_ids and delta.token_ids)):
            deltas = [{"content": ""}]
        events = b""
        for number, fields in enumerate(deltas):
            entries, token_ids = (delta.entries, delta.token_ids) if number == 0 else ((), None)
            events += self._chunk(answer, delta.choice, fields, entries=entries, token_ids=token_ids)
        return events

    def _message(self, index: int) -> ChoiceMessage:
        message = self._messages.get(index)
        if message is None:
            message = self._messages[index] = ChoiceMessage(self._rules)
        return message

    def _finish_reason(self, choice: ChoiceDelta | CollectedChoice) -> str | None:
        index = choice.choice if isinstance(choice, ChoiceDelta) else choice.index
        called = self._rules.forced is None and index in self._messages and self._messages[index].has_calls
        return "tool_calls" if called and choice.finish_reason == "stop" else choice.finish_reason

    def _chunk(
        self,
        answer: Answer,
        index: int,
        delta: dict[str, Any],
        *,
        entries: Sequence[TokenEntry] = (),
        finish_reason: str | None = None,
        token_ids: list[int] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(entries) if entries else None,
            "finish_reason": finish_reason,
        }
        if self._format.token_ids:
            choice["token_ids"] = token_ids
        fields = self._fields(answer)
        fields["choices"] = [choice]
        if self._format.include_usage:
            fields["usage"] = answer.usage() if self._format.continuous_usage else None
        if extra:
            fields.update(extra)
        return sse(encode_json(fields))

    def _fields(self, answer: Answer) -> dict[str, Any]:
        fields = self._head.fields(answer)
        if self._tier is not None:
            fields["service_tier"] = self._tier
        return fields

    def _choice(self, choice: CollectedChoice) -> dict[str, Any]:
        message = self._message(choice.index).whole(choice.text)
        fields: dict[str, Any] = {
            "index": choice.index,
            "message": message,
            "logprobs": None,
            "finish_reason": self._finish_reason(choice),
        }
        if self._num_top is not None:
            content = chat_logprobs(self._pieces, choice.entries, self._num_top)
            fields = Spread(fields, logprobs=Spread(content=content, refusal=None))
        if choice.stop_reason is not None:
            fields["stop_reason"] = choice.stop_reason
        if self._format.token_ids:
            fields["token_ids"] = choice.token_ids
        return fields

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        return {"content": list(chat_logprobs(self._pieces, entries, self._num_top or 0)), "refusal": None}
