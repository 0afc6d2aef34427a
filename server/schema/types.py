"""The bodies of /v1/chat/completions and /v1/completions, checked field by field.

`null` equals absent. A wrong type or range is a 400 that names the field. A known field that would change the answer
and is not offered is a 400 too, unless it is empty or false and so says nothing; hints that cannot change it are
accepted; unknown fields are ignored. docs/api.md lists every field, and a test compares the two.

    ModelFields        what every generating route takes, /v1/responses included
    +-- SamplingFields   what the two routes here share
        |-- ChatRequest
        +-- CompletionRequest
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from server.errors import InvalidRequestError
from server.schema.decoding import decode_json, unsupported
from server.schema.parts import MAX_TOOLS, Message, ResponseFormat, StreamOptions, StructuredOutputs, Tool, ToolChoice

MAX_STOP_CHARS: Final = 1024
MAX_MESSAGES: Final = 65_536

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
PositiveCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Probability = Annotated[float, Meta(ge=0, le=1)]
ShortText = Annotated[str, Meta(max_length=64)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ToolMode = Literal["none", "auto", "required", "named"]

_NOTHING: Final[tuple[object, ...]] = (None, False, "", [])
_PRIVATE: Final = "is not offered on the public port"
_CONSTRAINTS: Final = "is not offered: use structured_outputs"


class ModelFields(Struct, kw_only=True):
    """The model, how it draws, and hints: the same on every generating route, vLLM's extensions included."""

    hints: ClassVar[frozenset[str]] = frozenset(
        {
            "metadata",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "store",
            "user",
        }
    )
    refused: ClassVar[Mapping[str, str]] = {
        "bootstrap_host": _PRIVATE,
        "bootstrap_port": _PRIVATE,
        "bootstrap_room": _PRIVATE,
        "custom_logit_processor": _PRIVATE,
        "ebnf": _CONSTRAINTS,
        "grammar": _CONSTRAINTS,
        "guided_choice": _CONSTRAINTS,
        "guided_grammar": _CONSTRAINTS,
        "guided_json": _CONSTRAINTS,
        "guided_regex": _CONSTRAINTS,
        "json_schema": _CONSTRAINTS,
        "kv_transfer_params": _PRIVATE,
        "logits_processors": _PRIVATE,
        "lora_path": _PRIVATE,
        "mirostat": "is not offered",
        "moderation": "is not offered",
        "n_predict": "is not offered: use max_tokens",
        "prompt_embeds": _PRIVATE,
        "regex": _CONSTRAINTS,
        "repeat_penalty": "is not offered: use repetition_penalty",
        "return_hidden_states": _PRIVATE,
        "return_tokens_as_token_ids": "is not offered: use return_token_ids",
        "session_params": _PRIVATE,
        "stop_regex": "is not offered: use stop",
        "thinking_token_budget": "is not offered: use reasoning_effort",
        "use_beam_search": "is not offered: the server samples",
        "vllm_xargs": _PRIVATE,
    }

    model: Annotated[str, Meta(min_length=1, max_length=1024)]
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    stream: bool | None = None
    stop: str | list[str] | None = None
    seed: Int64 | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    structured_outputs: StructuredOutputs | None = None

    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Probability | None = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Annotated[list[str], Meta(max_length=1024)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=1_000_000)] | None = None
    truncate_prompt_tokens: PositiveCount | None = None
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None

    metadata: dict[str, Annotated[str, Meta(max_length=512)]] | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: ShortText | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    store: bool | None = None
    user: str | None = None

    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    custom_logit_processor: Any = None
    ebnf: Any = None
    grammar: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    json_schema: Any = None
    kv_transfer_params: Any = None
    logits_processors: Any = None
    lora_path: Any = None
    mirostat: Any = None
    moderation: Any = None
    n_predict: Any = None
    prompt_embeds: Any = None
    regex: Any = None
    repeat_penalty: Any = None
    return_hidden_states: Any = None
    return_tokens_as_token_ids: Any = None
    session_params: Any = None
    stop_regex: Any = None
    thinking_token_budget: Any = None
    use_beam_search: Any = None
    vllm_xargs: Any = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check_fields(self) -> None:
        """What is refused, and what no single field's type can say. Raises InvalidRequestError."""
        for field, why in self.refused.items():
            if getattr(self, field) not in _NOTHING:
                raise unsupported(field, why)
        stops = self.stop_strings
        if len(stops) > 4:
            raise InvalidRequestError("stop takes at most 4 strings.", param="stop")
        if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
            raise InvalidRequestError(f"a stop string has 1 to {MAX_STOP_CHARS} characters.", param="stop")
        if self.metadata is not None and (len(self.metadata) > 16 or any(len(key) > 64 for key in self.metadata)):
            raise InvalidRequestError("metadata takes 16 pairs with keys of 64 characters.", param="metadata")
        if self.structured_outputs is not None:
            self.structured_outputs.check()


class SamplingFields(ModelFields, kw_only=True):
    """What chat and completions share."""

    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    prompt_logprobs: TopLogprobs | None = None
    return_token_ids: bool | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    def check(self) -> None:
        """Raises InvalidRequestError."""
        self.check_fields()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only allowed with stream: true.", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs is not available with stream: true.", param="prompt_logprobs")
        formatted = self.response_format
        if formatted is None or formatted.type == "text":
            return
        if self.structured_outputs is not None:
            text = "response_format and structured_outputs exclude each other."
            raise InvalidRequestError(text, param="structured_outputs")
        if formatted.type == "json_schema" and formatted.json_schema is None:
            raise InvalidRequestError("json_schema is required.", param="response_format.json_schema")


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
            message_.check(f"messages[{index}]")
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
