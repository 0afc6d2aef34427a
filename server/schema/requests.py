"""The bodies of the routes that run a model, checked field by field.

`null` equals absent. A wrong type or range is a 400 that names the field. So is a known field that would
change the answer and is not offered (`server.schema.field_table`), unless its value is neutral. Hints that cannot
change the answer are accepted, and unknown fields are ignored. docs/api.md lists every field, and a test checks it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from server.schema.decoding import LARGE_BODY_BYTES, TextLimit, invalid, read_json, unsupported
from server.schema.field_table import REFUSED_FIELDS, FieldRefusal
from server.schema.fields import (
    MAX_TOOLS,
    Count,
    FormatType,
    Message,
    ModelFields,
    PositiveCount,
    ReasoningEffort,
    RequestFields,
    SamplingFields,
    TextPart,
    TokenId,
    ToolCall,
    TopLogprobs,
)
from server.schema.intent import ChatIntent, Conversation
from server.schema.tools import ToolName, ToolSet, make_tool_set, read_choice, read_tools
from server.schema.wishes import WORDS, Wishes

MAX_MESSAGES: Final = 65_536  # bounds a body's objects; long sessions of agents have some thousand
OUTPUT_LOGPROBS: Final = "message.output_text.logprobs"
"""The value of `include` in /v1/responses that asks for log probabilities."""


class ChatRequest(SamplingFields, kw_only=True):
    text_field: ClassVar = "messages"

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    modalities: list[str] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Words for thoughts, see `server.schema.wishes`.
    thinking: Any = None
    enable_thinking: Any = None
    think: Any = None
    reasoning: Any = None
    thinking_budget: Any = None
    thinking_token_budget: Any = None
    thinking_budget_tokens: Any = None
    reasoning_budget: Any = None
    reasoning_budget_tokens: Any = None
    google: Any = None
    extra_body: Any = None

    prediction: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        """None: no log probabilities are asked for."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def wishes(self) -> Wishes:
        """Raises InvalidRequestError."""
        wishes = Wishes(self.chat_template_kwargs)
        wishes.add_words({name: getattr(self, name) for name in WORDS})
        return wishes

    def check(self) -> None:
        SamplingFields.check(self)
        if self.max_tokens == 0 or self.max_completion_tokens == 0:
            raise invalid("max_tokens" if self.max_tokens == 0 else "max_completion_tokens", "must be at least 1")
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "needs logprobs: true")
        if self.modalities is not None and self.modalities != ["text"]:
            raise unsupported("modalities", "can only be ['text']: this server makes text")
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid("continue_final_message", "and add_generation_prompt exclude each other")
        for index, message in enumerate(self.messages):
            message.check(f"messages[{index}]")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise invalid("continue_final_message", "needs a last message of the assistant")

    def intent(self, *, clamps_max_tokens: bool = False) -> ChatIntent:
        """Return what a checked request asks for. Raises InvalidRequestError."""
        tool_set = make_tool_set(read_tools(self.tools or (), nested=True))
        mode, tools, named = tool_set.chosen(read_choice(self.tool_choice, tool_set, nested=True))
        conversation = Conversation(
            messages=[_with_model_names(message.with_thoughts(), tool_set) for message in self.messages],
            tools=tools,
            is_continued=bool(self.continue_final_message),
            add_generation_prompt=self.add_generation_prompt is not False,
            template_kwargs=self.chat_template_kwargs or {},
            wishes=self.wishes,
        )
        return ChatIntent(
            conversation=conversation,
            fields=self,
            stops=self.stop_strings,
            num_choices=self.num_choices,
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            clamps_max_tokens=clamps_max_tokens,
            num_top_logprobs=self.num_top_logprobs,
            num_prompt_logprobs=self.prompt_logprobs,
            tool_mode=mode,
            named_tool=named,
            tool_set=tool_set,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            response_format=self.response_format,
        )


def _with_model_names(message: Message, tool_set: ToolSet) -> Message:
    """Write a message's calls as functions, under the model's names."""
    if not message.tool_calls:
        return message
    calls = []
    for call in message.tool_calls:
        if call.custom is None or call.type != "custom":
            name, text = ToolName(call.called.name, "function", call.called.namespace), call.called.arguments
        else:
            name, text = ToolName(call.custom.name, "custom", call.custom.namespace), call.custom.input
        calls.append(ToolCall(id=call.id, function=tool_set.call(name, text)))
    return msgspec.structs.replace(message, tool_calls=calls)


class CompletionRequest(SamplingFields, kw_only=True):
    text_field: ClassVar = "prompt"

    prompt: str | list[Any] | None = None
    best_of: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    add_special_tokens: bool | None = None

    @property
    def token_limit(self) -> int:
        """The most tokens of an answer. With `max_tokens` 0, which scores a prompt, one is sampled and not shown."""
        return 16 if self.max_tokens is None else self.max_tokens or 1

    def check(self) -> None:
        SamplingFields.check(self)
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens", "can be 0 only with echo: true")
        if self.best_of is not None and self.best_of > 0:
            if self.best_of < self.num_choices:
                raise invalid("best_of", "must be at least n")
            if self.stream and self.best_of > self.num_choices:
                raise invalid("best_of", "is not available with stream: true")


class InputItem(Struct, kw_only=True):
    """An item of any type. The type decides which fields count."""

    type: str | None = None
    role: str | None = None
    content: str | list[TextPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: Any = None
    output: Any = None
    action: Any = None
    operation: Any = None
    tools: Any = None
    summary: Any = None
    id: str | None = None
    status: str | None = None

    @property
    def kind(self) -> str:
        return "message" if self.type is None else self.type


class TextFormat(Struct, kw_only=True, omit_defaults=True):
    type: FormatType
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(Struct, kw_only=True):
    effort: ReasoningEffort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(ModelFields, kw_only=True):
    """`max_output_tokens` and `text.format` are max_completion_tokens and response_format in chats."""

    text_field: ClassVar = "input"

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: PositiveCount | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    top_logprobs: TopLogprobs | None = None
    include: list[str] | None = None
    stream_options: dict[str, Any] | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        """None: no log probabilities are asked for."""
        asked = self.top_logprobs is not None or OUTPUT_LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if asked else None

    def check(self) -> None:
        ModelFields.check(self)
        if self.truncation == "auto":
            raise unsupported("truncation", "can only be disabled")


class ChatOfItems(ResponsesRequest, kw_only=True):
    """A body of responses that is sent to chats, and may have their words for a length and an effort."""

    max_tokens: PositiveCount | None = None
    max_completion_tokens: PositiveCount | None = None
    reasoning_effort: ReasoningEffort | None = None

    def check(self) -> None:
        ResponsesRequest.check(self)
        self.max_output_tokens = self.max_output_tokens or self.max_completion_tokens or self.max_tokens
        if self.reasoning is None or self.reasoning.effort is None:
            self.reasoning = ReasoningOptions(effort=self.reasoning_effort)


BodyT = TypeVar("BodyT", bound=RequestFields)


class BodyDecoder(Generic[BodyT]):
    """The decoder and the checks of one route's bodies."""

    def __init__(self, kind: type[BodyT], route: str, ignored: tuple[str, ...] = ()) -> None:
        """`ignored`: fields that the route refuses, but not in this kind of body."""
        honoured = {*kind.__struct_fields__, *ignored}
        refused = {name: refusal for name, refusal in REFUSED_FIELDS[route].items() if name not in honoured}
        advised = {name: refused.get(refusal.advised_field, refusal) for name, refusal in refused.items()}
        self.refused: Mapping[str, FieldRefusal] = {
            name: replace(refusal, why=advised[name].why) for name, refusal in refused.items()
        }
        """With the reason of the advised field, if that is refused too."""
        self._text_field = kind.text_field
        # A refused field has a type of its own, which accepts only the values that change nothing.
        fields = [(name, type(name, (), {"refusal": refusal}) | None, None) for name, refusal in self.refused.items()]
        decoded = msgspec.defstruct(kind.__name__, fields, bases=(kind,), kw_only=True)
        # Not strict: clients of typed languages send 100.0 for 100, and forms send "100".
        self._decode = msgspec.json.Decoder(decoded, dec_hook=_accept_neutral, strict=False).decode

    async def read(self, body: bytes, text_limit: Callable[[], TextLimit]) -> BodyT:
        """Return a checked request. A large one yields to the event loop between steps. Raises InvalidRequestError."""
        is_large = len(body) >= LARGE_BODY_BYTES
        request: BodyT = await read_json(body, self._decode, text_limit, self._text_field)
        if is_large:
            await asyncio.sleep(0)
        request.check()
        if is_large:
            await asyncio.sleep(0)
        return request


def _accept_neutral(kind: Any, value: object) -> Any:
    if isinstance(value, dict):  # null equals absent
        value = {name: item for name, item in value.items() if item is not None}
    if value not in kind.refusal.neutral:
        raise unsupported(kind.__name__, kind.refusal.why, kind.refusal.details)
    return kind()


def batch_of(prompts: str | list[Any] | None, param: str) -> list[str | list[int]]:
    """Return the prompts of a field: one text or one list of token ids each. Raises InvalidRequestError."""
    if not prompts:
        raise invalid(param, "must not be empty")
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        return [_one_prompt(prompts, param)]
    return [_one_prompt(item, f"{param}[{index}]") for index, item in enumerate(prompts)]


def _one_prompt(item: object, param: str) -> str | list[int]:
    if not isinstance(item, str | list) or not item:
        raise invalid(param, "must be a non-empty string or a non-empty list of token ids")
    try:
        return item if isinstance(item, str) else msgspec.convert(item, list[TokenId])
    except msgspec.ValidationError as error:
        raise invalid(param, f"must hold token ids, which are integers from 0: {error}") from None


CHAT: Final = BodyDecoder(ChatRequest, "/v1/chat/completions")
COMPLETION: Final = BodyDecoder(CompletionRequest, "/v1/completions")
RESPONSES: Final = BodyDecoder(ResponsesRequest, "/v1/responses")
CHAT_OF_ITEMS: Final = BodyDecoder(ChatOfItems, "/v1/responses")
