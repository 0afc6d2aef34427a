"""/v1/chat/completions: prepare a prompt from messages, and format deltas as chat chunks or one answer.

tool_choice   the model sees      its text is read as
none          tools               content
auto          tools, and is free  its family's format
required      tools, and a form   its family's form; a list of calls where that is unknown
one function  the same, once      the same; that function's arguments where the form is unknown
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Final

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from server.api.endpoint import GenerateEndpoint, PreparedRequest
from server.api.formatting import (
    ChunkFormatter,
    LazyJson,
    ResponseFormatter,
    chat_logprobs,
    encode_json,
    json_response,
    response_id,
)
from server.api.prompts import params
from server.api.prompts.client_lines import conversation_without_line
from server.api.prompts.grammars import MAX_SCHEMA_BYTES, chat_grammar, has_format
from server.api.prompts.items import responses_intent
from server.api.prompts.limits import TokenLimits, check_text, encode_any
from server.auth.identity import Identity, identity_of
from server.errors import ContextLengthError, InvalidRequestError
from server.http.stream import sse
from server.models.served_model import ServedModel
from server.request.choice import ChoiceDelta, GenerationSpec
from server.request.response import ResponseStream
from server.request_context import CURRENT, trace_stage
from server.schema.decoding import TextLimit, fields_of, invalid, require_json
from server.schema.fields import ModelFields, StreamOptions
from server.schema.intent import ChatIntent, Conversation
from server.schema.requests import CHAT, CHAT_OF_ITEMS, ChatRequest
from server.schema.tools import converted
from server.text.control_tokens import RenderedPrompt
from server.text.formats import CALL_LIST
from server.text.formats.reasoning import THINK
from server.text.output_parser import ChoiceMessage, OutputRules, ReasoningStart
from server.text.template_input import MAX_TEXT_BYTES, TEXT_BYTES_PER_TOKEN, text_size
from worker.common.capabilities import CHAT as CHAT_PATH
from worker.wire import SamplingParams

_INPUT: Final = re.compile(rb'"input"\s*:')
"""A field at any depth: in a text, the quotes would be escaped."""


class ConversationEndpoint(GenerateEndpoint):
    """A route of any API for chats: its body becomes a `ChatIntent`."""

    formatter: ClassVar[Callable[..., ResponseFormatter]]
    """Makes the writer of an answer, of the request, its spec and its rules."""

    @abstractmethod
    async def read(self, body: bytes, limit: Callable[[], TextLimit], *, counts: bool = False) -> ChatIntent:
        """Decode and check a body. `counts`: only its prompt is wanted. Raises ApiError."""

    async def prepare(self, body: bytes, identity: Identity) -> PreparedRequest:
        with trace_stage("validate"):
            intent = await self.read(body, self._models.text_limit)
            request = intent.fields
            self._services.ignored_tools.take(intent)
        with trace_stage("tokenise"):
            model = self._model(request.model, identity)
            spec, rules = await chat_spec(intent, model, identity, response_id(self.prefix))
        return PreparedRequest((spec,), self.formatter(request, spec, rules), bool(request.stream))

    async def count(self, http_request: Request) -> Response:
        """Count the prompt that a body would send, even one that no context holds. Raises ApiError."""
        require_json(http_request.scope["headers"])
        _, ids = await self.prompt_of(await http_request.body(), identity_of(http_request.scope))
        return json_response(self.counted | {"input_tokens": len(ids)})

    async def prompt_of(self, body: bytes, identity: Identity) -> tuple[ServedModel, Sequence[int]]:
        """Return the model, and the prompt that a body would send. Raises ApiError."""
        services = self._services
        prepared = await services.engine_text.prepare(CHAT_PATH, body, identity, self, counts=True)
        if prepared is not None:
            return prepared.specs[0].model, prepared.specs[0].prompt_ids
        intent = await self.read(body, self._models.text_limit, counts=True)
        services.ignored_tools.take(intent)
        param, model = intent.names.messages, self._model(intent.fields.model, identity)
        rendered = await render_chat(intent.conversation, model)
        ids = await encode_any(rendered.text, model, param, client_offsets=rendered.client_offsets)
        return model, TokenLimits(intent.fields, param).truncated(ids)

    counted: ClassVar[dict[str, Any]] = {}
    """Further fields of the answer of `count`."""


async def chat_spec(
    intent: ChatIntent, model: ServedModel, identity: Identity, id_: str
) -> tuple[GenerationSpec, OutputRules]:
    """Render and tokenise a chat, and apply its limits. Raises ApiError."""
    fields, names = intent.fields, intent.names
    limits = TokenLimits(fields, names.messages, names.max_tokens, intent.max_tokens, intent.clamps_max_tokens)
    rendered = await render_chat(intent.conversation, model)
    prompt_ids = await limits.prompt_tokens(rendered.text, model, client_offsets=rendered.client_offsets)
    max_tokens = limits.token_budget(model, len(prompt_ids))
    rules = output_rules(intent, model, rendered.text)
    constraint = await chat_grammar(intent, model, rules)
    start, end = rules.thoughts.starts[0], rules.thoughts.ends[0]
    sampling = SamplingParams(
        max_tokens=max_tokens,
        logprobs=intent.num_top_logprobs,
        prompt_logprobs=intent.num_prompt_logprobs,
        grammar=constraint.grammar,
    )
    spec = replace(
        params.new_spec(id_, model, identity, fields, names.messages),
        prompt_ids=prompt_ids,
        seeds=params.choice_seeds(fields.seed, intent.num_choices),
        sampling=await params.with_sampling(sampling, fields, model, intent.num_choices),
        rules=params.text_rules(fields, intent.stops, model, rules),
        grammar_param=constraint.param,
        relaxed=constraint.relaxed,
        clamps_max_tokens=limits.clamps or limits.max_tokens is None,
        thoughts=None if rules.reasoning == "none" else (start.encode(), end.encode()),
        begins_in_thoughts=rules.reasoning == "inside",
    )
    return spec, rules


async def render_chat(conversation: Conversation, model: ServedModel) -> RenderedPrompt:
    """Render the prompt's text, in slices, without known lines of agents. Raises InvalidRequestError."""
    param = conversation.names.messages
    if not model.keeps_client_lines:
        conversation, rule = conversation_without_line(conversation)
        if rule and (context := CURRENT.get(None)) is not None:
            context.removal_rule = rule
    template = model.template_for(conversation)
    if template is None:
        raise InvalidRequestError("This model has no chat template: use /v1/completions.", param=param)
    if conversation.tools and len(encode_json(conversation.tools)) > MAX_SCHEMA_BYTES:
        raise invalid("tools", f"take at most {MAX_SCHEMA_BYTES} bytes of JSON")
    if len(encode_json(conversation.template_kwargs)) > params.MAX_KWARGS_BYTES:
        raise invalid("chat_template_kwargs", f"takes at most {params.MAX_KWARGS_BYTES} bytes of JSON")
    if any(tool.strict is not None for tool in conversation.tools):  # the grammar's: agents set it in some turns
        tools = [replace(tool, strict=None) for tool in conversation.tools]
        conversation = dataclasses.replace(conversation, tools=tools)
    num_chars, num_bytes = text_size(conversation)
    check_text(num_chars, model, param)
    max_bytes = max(MAX_TEXT_BYTES, TEXT_BYTES_PER_TOKEN * model.max_model_len)
    if num_bytes > max_bytes:
        message = f"your messages hold {num_chars} characters, and at most {max_bytes} bytes in memory"
        raise ContextLengthError(message, model.max_model_len, param=param)
    rendered = await template.render_in_slices(conversation, model.tokenizer.executor)
    if (context := CURRENT.get(None)) is not None:
        context.repairs = rendered.repairs
        context.ignore(rendered.ignored)
    return rendered


def output_rules(intent: ChatIntent, model: ServedModel, prompt: str) -> OutputRules:
    """Return how the model's text is read. `prompt` is the rendered text: it may have opened the reasoning already."""
    known, own = intent.tool_set.names, model.forced_format
    if intent.named_tool is not None and (own is None or intent.named_tool.name in intent.tool_set.grammars):
        forced = intent.named_tool.name
        return OutputRules(forced=forced, client_names=known, is_raw_input=forced in intent.tool_set.grammars)
    schemas = {tool.name: tool.arguments_schema for tool in intent.conversation.tools}
    names, parallel = frozenset(schemas), intent.parallel_tool_calls
    if intent.tool_mode == "required" and own is None:
        return OutputRules(tools=CALL_LIST, tool_names=names, parallel=parallel, client_names=known)
    reasoning: ReasoningStart = "none"
    if model.thoughts is not None and not has_format(intent.response_format, intent.fields.structured_outputs):
        reasoning = "inside" if model.thoughts.is_begun_by(prompt) else "maybe"
    rules = OutputRules(reasoning=reasoning, thoughts=model.thoughts or THINK, thought_fields=model.thought_fields)
    if intent.tool_mode == "none":
        return rules
    return dataclasses.replace(
        rules,
        tools=model.tool_format,
        tool_names=names if intent.named_tool is None else frozenset({intent.named_tool.name}),
        schemas=schemas,
        parallel=parallel and intent.named_tool is None,
        client_names=known,
        is_required=intent.tool_mode in ("required", "named"),
        is_named=intent.named_tool is not None,
        shows_special=model.tool_format is None,
    )


class ChatFormatter(ChunkFormatter):
    """Chat shapes. Source: the OpenAI specification's CreateChatCompletionResponse and its stream twin."""

    prompt_per_choice = False

    def __init__(self, request: ChatRequest, spec: GenerationSpec, rules: OutputRules) -> None:
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        super().__init__(kind, request, spec, request.num_top_logprobs)
        if request.service_tier is not None:
            self._head["service_tier"] = "default"
        self._rules = rules
        self._messages: dict[int, ChoiceMessage] = {}
        self._prefix = b""
        """The bytes of a plain chunk that precede the choice's index."""
        annotated = self._num_top is not None or self._usage_in_chunks or self._token_ids
        self._plain = rules.plain and not annotated
        self._suffix = b',"usage":null}\n\n' if self._include_usage else b"}\n\n"

    def events(self, response: ResponseStream, deltas: Sequence[ChoiceDelta]) -> bytes:
        if not self._prefix:
            self._prefix = b"data: " + encode_json(self._fields(response))[:-1] + b',"choices":[{"index":'
        return b"".join([self._delta_events(response, delta) for delta in deltas])

    def _delta_events(self, response: ResponseStream, delta: ChoiceDelta) -> bytes:
        events, index = b"", delta.choice
        if index not in self._messages:
            self._messages[index] = ChoiceMessage(self._rules)
            prompt = list(response.first.spec.prompt_ids) if self._token_ids and index == 0 else None
            content = None if self._rules.only_calls else ""
            events = self._chunk(response, index, {"role": "assistant", "content": content}, prompt)
        if not self._plain:
            events += self._parsed_events(response, delta)
        elif delta.text:
            events += self._prefix + b'%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}]%b' % (
                index,
                encode_json(delta.text),
                self._suffix,
            )
        if delta.finish_reason is not None:
            events += self._chunk(response, index, {}, finish_reason=self._finish_reason(delta))
        return events

    def _parsed_events(self, response: ResponseStream, delta: ChoiceDelta) -> bytes:
        """Write one chunk per part of a message. Log probabilities and token ids go with the first."""
        parts = self._messages[delta.choice].deltas(delta.text, last=delta.finish_reason is not None)
        if not parts and (delta.entries or (self._token_ids and delta.token_ids)):
            parts = [{"content": ""}]
        extras: dict[str, Any] = {"token_ids": delta.token_ids} if self._token_ids else {}
        if delta.entries:
            content = list(chat_logprobs(self._token_bytes, delta.entries, self._num_top or 0))
            extras["logprobs"] = {"content": content, "refusal": None}
        events = b""
        for part in parts:
            events += self._chunk(response, delta.choice, part, **extras)
            extras = {}
        return events

    def _finish_reason(self, choice: ChoiceDelta) -> str | None:
        is_named = self._rules.is_named or self._rules.forced is not None
        has_calls = not is_named and self._messages[choice.choice].has_calls(choice.stop_reason)
        return "tool_calls" if has_calls and choice.finish_reason == "stop" else choice.finish_reason

    def _chunk(
        self, response: ResponseStream, index: int, delta: dict[str, Any], prompt: object = None, **fields: Any
    ) -> bytes:
        """Write a chunk of one choice, with further `fields` of it, and the ids of the `prompt`."""
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
        if self._token_ids:
            choice.setdefault("token_ids", None)
        chunk = self._chunk_fields(response, [choice])
        return sse(encode_json(chunk if prompt is None else chunk | {"prompt_token_ids": prompt}))

    def _choices(self, response: ResponseStream, choices: Sequence[ChoiceDelta]) -> Iterator[dict[str, Any]]:
        for choice in choices:
            message = self._messages[choice.choice] = ChoiceMessage(self._rules)
            logprobs = None
            if self._num_top is not None:
                content = chat_logprobs(self._token_bytes, choice.entries, self._num_top)
                logprobs = LazyJson(content=content, refusal=None)
            fields = {"index": choice.choice, "message": message.whole(choice.text), "logprobs": logprobs}
            yield self._whole_choice(choice, **fields, finish_reason=self._finish_reason(choice))


class ChatEndpoint(ConversationEndpoint):
    route, prefix, formatter = "chat", "chatcmpl-", ChatFormatter

    async def read(self, body: bytes, limit: Callable[[], TextLimit], *, counts: bool = False) -> ChatIntent:
        """Read a body of chats, or one of responses: Cursor sends those here, and reads chunks.

        Raises InvalidRequestError.
        """
        if not (_INPUT.search(body) and _is_of_responses(body)):
            request = await CHAT.read(body, limit)
            return request.intent(clamps_max_tokens=self._services.config.clamp_max_tokens)
        given = await CHAT_OF_ITEMS.read(body, limit)
        intent = responses_intent(given)
        request = ChatRequest(
            **{name: getattr(given, name) for name in ModelFields.__struct_fields__},
            messages=intent.conversation.messages,
            stream_options=converted(given.stream_options or {}, StreamOptions, "stream_options"),
            logprobs=intent.num_top_logprobs is not None,
            top_logprobs=intent.num_top_logprobs,
        )
        return dataclasses.replace(intent, fields=request)


def _is_of_responses(body: bytes) -> bool:
    with contextlib.suppress(ValueError, RecursionError):  # the reader of chats names what is wrong
        fields = fields_of(body)
        return bytes(fields.get("messages", b"null")) == b"null" != bytes(fields.get("input", b"null"))
    return False
