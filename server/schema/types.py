"""The bodies of /v1/chat/completions and /v1/completions, checked field by field.

`null` equals absent. A wrong type or range is a 400 that names the field. A known field that would change the answer
and is not offered is a 400 too, unless it is empty or false and so says nothing; hints that cannot change it are
accepted; unknown fields are ignored. docs/api.md lists every field, and a test compares the two.

    fields.ModelFields          what every generating route takes, /v1/responses included
    +-- fields.SamplingFields   what the two routes here share
        |-- ChatRequest
        +-- CompletionRequest
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from server.errors import InvalidRequestError
from server.schema.decoding import decode_json, inspect, unsupported
from server.schema.fields import Count, ModelFields, ReasoningEffort, SamplingFields, TokenId, TopLogprobs
from server.schema.parts import MAX_TOOLS, Message, Tool, ToolChoice

MAX_MESSAGES: Final = 65_536

ToolMode = Literal["none", "auto", "required", "named"]


class ChatRequest(SamplingFields, kw_only=True):
    hints: ClassVar[frozenset[str]] = ModelFields.hints | {"prediction", "verbosity"}
    refused: ClassVar[Mapping[str, str]] = {
        **ModelFields.refused,
        "add_special_tokens": "is not offered: the chat template writes them",
        "audio": "is not offered: this server makes text",
        "chat_template": "is not accepted from a request",
        "documents": "is not offered",
        "echo": "is not offered: use /v1/completions",
        "function_call": "is deprecated: use tool_choice",
        "functions": "is deprecated: use tools",
        "input_ids": "is not offered: use /v1/completions with a prompt of token ids",
        "mm_processor_kwargs": "is not offered: this model reads text",
        "web_search_options": "is not offered",
    }

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[Tool], Meta(min_length=1, max_length=MAX_TOOLS)] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    modalities: list[str] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    prediction: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    add_special_tokens: Any = None
    audio: Any = None
    chat_template: Any = None
    documents: Any = None
    echo: Any = None
    function_call: Any = None
    functions: Any = None
    input_ids: Any = None
    mm_processor_kwargs: Any = None
    web_search_options: Any = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def tool_mode(self) -> ToolMode:
        """What the model has to do with `usable_tools`."""
        choice = self.tool_choice
        if not self.tools or choice == "none":
            return "none"
        if not isinstance(choice, ToolChoice):
            return "required" if choice == "required" else "auto"
        return "named" if choice.allowed_tools is None else choice.allowed_tools.mode

    @property
    def usable_tools(self) -> list[Tool]:
        """Those that the model is told of: all, or those that tool_choice allows."""
        if self.tool_mode == "none":
            return []
        choice, tools = self.tool_choice, self.tools or []
        if not isinstance(choice, ToolChoice) or choice.allowed_tools is None:
            return tools
        allowed = {tool.function.name for tool in choice.allowed_tools.tools if tool.function is not None}
        return [tool for tool in tools if tool.name in allowed]

    @property
    def named_tool(self) -> Tool:
        """The one function that has to be called, in the mode `named`."""
        assert isinstance(self.tool_choice, ToolChoice)
        assert self.tool_choice.function is not None, "checked with the request"
        name = self.tool_choice.function.name
        return next(tool for tool in self.tools or () if tool.name == name)

    def check(self) -> None:
        SamplingFields.check(self)
        for field in ("max_completion_tokens", "max_tokens"):
            if getattr(self, field) == 0:
                raise InvalidRequestError(f"{field} must be at least 1.", param=field)
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
        if self.modalities is not None and self.modalities != ["text"]:
            raise unsupported("modalities", "can only be ['text']: this server makes text")
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt exclude each other."
            raise InvalidRequestError(message, param="continue_final_message")
        for index, message_ in enumerate(self.messages):
            try:
                message_.check()
            except InvalidRequestError as error:
                error.param = f"messages[{index}].{error.param}"
                raise
        if self.continue_final_message and self.messages[-1].role != "assistant":
            message = "continue_final_message needs a last message of the assistant."
            raise InvalidRequestError(message, param="continue_final_message")
        _check_tools(self)


class CompletionRequest(SamplingFields, kw_only=True):
    refused: ClassVar[Mapping[str, str]] = {
        **ModelFields.refused,
        "suffix": "is not offered: the model does not fill in the middle",
    }

    prompt: str | list[Any] | None = None
    best_of: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    add_special_tokens: bool | None = None

    suffix: Any = None

    @property
    def token_limit(self) -> int:
        return 16 if self.max_tokens is None else self.max_tokens

    def check(self) -> None:
        SamplingFields.check(self)
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError("max_tokens can be 0 only with echo: true.", param="max_tokens")
        if self.best_of is not None and self.best_of > 0:
            if self.best_of < self.num_choices:
                raise InvalidRequestError("best_of must be at least n.", param="best_of")
            if self.stream and self.best_of > self.num_choices:
                raise InvalidRequestError("best_of is not available with stream: true.", param="best_of")

    def prompts(self) -> list[str | list[int]]:
        """The batch: one text or one list of token ids each. Raises InvalidRequestError."""
        match self.prompt:
            case str(text) if text:
                return [text]
            case [int(), *_]:
                return [_token_ids(self.prompt, "prompt")]
            case [_, *_]:
                return [_one_prompt(item, f"prompt[{index}]") for index, item in enumerate(self.prompt)]
        raise InvalidRequestError("prompt must not be empty.", param="prompt")


def _one_prompt(item: object, param: str) -> str | list[int]:
    match item:
        case str(text) if text:
            return text
        case [_, *_]:
            return _token_ids(item, param)
    raise InvalidRequestError("a prompt is a non-empty string or a non-empty list of token ids.", param=param)


def _token_ids(items: object, param: str) -> list[int]:
    try:
        return msgspec.convert(items, list[TokenId])
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"a prompt of token ids holds integers from 0: {error}.", param=param) from None


def _check_tools(request: ChatRequest) -> None:
    for index, tool in enumerate(request.tools or ()):
        if tool.type != "function" or tool.function is None:
            raise unsupported(f"tools[{index}].type", "can only be function")
    choice = request.tool_choice
    if isinstance(choice, ToolChoice):
        _check_tool_choice(choice, {tool.name for tool in request.tools or ()})
    elif choice not in (None, "none", "auto", "required"):
        text = "tool_choice is none, auto, required, one function or allowed_tools."
        raise InvalidRequestError(text, param="tool_choice")
    elif choice in ("auto", "required") and not request.tools:
        raise InvalidRequestError("tool_choice needs tools.", param="tool_choice")
    if request.structured_outputs is not None and request.tool_mode != "none":
        text = "structured_outputs would keep the model from calling tools: use response_format or tool_choice none."
        raise InvalidRequestError(text, param="structured_outputs")


def _check_tool_choice(choice: ToolChoice, names: set[str]) -> None:
    match choice.type:
        case "function" if choice.function is not None:
            chosen = [choice.function.name]
        case "allowed_tools" if choice.allowed_tools is not None:
            chosen = [tool.function.name if tool.function else "" for tool in choice.allowed_tools.tools]
        case _:
            raise unsupported("tool_choice.type", "can only be function or allowed_tools")
    if not names.issuperset(chosen):
        text = "tool_choice names a function that is not among the tools."
        raise InvalidRequestError(text, param="tool_choice")


RequestT = TypeVar("RequestT", ChatRequest, CompletionRequest)
_DECODERS: Final[dict[type, Callable[[bytes], Any]]] = {
    kind: msgspec.json.Decoder(kind).decode for kind in (ChatRequest, CompletionRequest)
}


def decode(body: bytes, kind: type[RequestT]) -> RequestT:
    """A checked request. Raises InvalidRequestError, whatever the bytes are."""
    request: RequestT = decode_json(body, _DECODERS[kind])
    request.check()
    return request


async def read(body: bytes, kind: type[RequestT], max_text_bytes: int | None, param: str) -> RequestT:
    """`decode` with rests between the steps of a large body, which is inspected first. `param`: where its text is."""
    if not await inspect(body, max_text_bytes, param):
        return decode(body, kind)
    request: RequestT = decode_json(body, _DECODERS[kind], inspected=True)
    await asyncio.sleep(0)
    request.check()
    await asyncio.sleep(0)
    return request
