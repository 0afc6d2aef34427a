"""The bodies of /v1/chat/completions and /v1/completions, checked field by field.

`null` equals absent. A wrong type or range is a 400 that names the field. A known field that would change the answer
and is not offered is a 400 too; hints that cannot change it are accepted; unknown fields are ignored.

    ChatRequest, CompletionRequest   one body each, over SamplingFields (what both share)
    decode(body, kind)               bytes -> one of them, or InvalidRequestError
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from server.errors import InvalidRequestError

MAX_STOP_CHARS: Final = 1024
MAX_MESSAGES: Final = 65_536

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Probability = Annotated[float, Meta(ge=0, le=1)]
ShortText = Annotated[str, Meta(max_length=64)]


class TextPart(Struct, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Struct, kw_only=True):
    name: str
    arguments: str = ""


class ToolCall(Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Struct, kw_only=True):
    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    audio: Any = None


class FunctionDefinition(Struct, kw_only=True):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, kw_only=True):
    type: str
    function: FunctionDefinition | None = None


class NamedFunction(Struct, kw_only=True):
    name: str


class NamedTool(Struct, kw_only=True):
    type: str
    function: NamedFunction | None = None


class JsonSchemaFormat(Struct, kw_only=True):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Struct, kw_only=True):
    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: Annotated[str, Meta(max_length=65_536)] | None = None
    choice: list[str] | None = None
    grammar: Annotated[str, Meta(max_length=1_000_000)] | None = None


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(Struct, kw_only=True):
    """What both endpoints take, vLLM's extensions included."""

    model: Annotated[str, Meta(min_length=1, max_length=1024)]
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: Int64 | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    user: str | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None

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
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None

    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    kv_transfer_params: Any = None
    prompt_embeds: Any = None
    lora_path: Any = None
    custom_logit_processor: Any = None
    session_params: Any = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check(self) -> None:
        """What no single field's type can say. Raises InvalidRequestError."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only allowed with stream: true.", param="stream_options")
        stops = self.stop_strings
        if len(stops) > 4:
            raise InvalidRequestError("stop takes at most 4 strings.", param="stop")
        if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
            raise InvalidRequestError(f"a stop string has 1 to {MAX_STOP_CHARS} characters.", param="stop")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs is not available with stream: true.", param="prompt_logprobs")
        _check_structured(self)
        for field in _PRIVATE_FIELDS:
            if getattr(self, field) is not None:
                raise _unsupported(field, "is not offered on the public port")
        for field in _RENAMED_FIELDS:
            if getattr(self, field) is not None:
                raise _unsupported(field, "is not offered: use structured_outputs")


_PRIVATE_FIELDS: Final = (
    "kv_transfer_params",
    "prompt_embeds",
    "lora_path",
    "custom_logit_processor",
    "session_params",
)
_RENAMED_FIELDS: Final = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


class ChatRequest(SamplingFields, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Meta(min_length=1, max_length=128)] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    store: bool | None = None
    metadata: dict[str, Annotated[str, Meta(max_length=512)]] | None = None
    modalities: list[str] | None = None

    audio: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None
    chat_template: Any = None
    documents: Any = None
    moderation: Any = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check(self) -> None:
        SamplingFields.check(self)
        for field in ("max_completion_tokens", "max_tokens"):
            if getattr(self, field) == 0:
                raise InvalidRequestError(f"{field} must be at least 1.", param=field)
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
        if self.modalities is not None and self.modalities != ["text"]:
            raise _unsupported("modalities", "can only be ['text']: this server makes text")
        for field, why in _CHAT_REFUSED.items():
            if getattr(self, field) is not None:
                raise _unsupported(field, why)
        if self.metadata is not None and (len(self.metadata) > 16 or any(len(key) > 64 for key in self.metadata)):
            raise InvalidRequestError("metadata takes 16 pairs with keys of 64 characters.", param="metadata")
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt exclude each other."
            raise InvalidRequestError(message, param="continue_final_message")
        for index, message_ in enumerate(self.messages):
            _check_message(message_, f"messages[{index}]")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            message = "continue_final_message needs a last message of the assistant."
            raise InvalidRequestError(message, param="continue_final_message")
        _check_tools(self)


_CHAT_REFUSED: Final = {
    "audio": "is not offered: this server makes text",
    "web_search_options": "is not offered",
    "functions": "is deprecated: use tools",
    "function_call": "is deprecated: use tool_choice",
    "chat_template": "is not accepted from a request",
    "documents": "is not offered",
    "moderation": "is not offered",
}


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: str | list[Any] | None = None
    best_of: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None
    prompt_cache_key: ShortText | None = None

    @property
    def token_limit(self) -> int:
        return 16 if self.max_tokens is None else self.max_tokens

    def check(self) -> None:
        SamplingFields.check(self)
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError("max_tokens can be 0 only with echo: true.", param="max_tokens")
        if self.suffix is not None:
            raise _unsupported("suffix", "is not offered: the model does not fill in the middle")
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


def _check_message(message: Message, param: str) -> None:
    if message.role not in ("system", "developer", "user", "assistant", "tool", "function"):
        text = "role must be one of developer, system, user, assistant, tool."
        raise InvalidRequestError(text, param=f"{param}.role")
    if message.audio is not None:
        raise _unsupported(f"{param}.audio", "is not offered: this model reads text")
    if isinstance(message.content, list):
        for index, part in enumerate(message.content):
            text_part = part.type in ("text", "input_text", "output_text") and part.text is not None
            if not text_part and not (part.type == "refusal" and part.refusal is not None):
                at = f"{param}.content[{index}].type"
                raise InvalidRequestError("this model reads text: only parts of type text are accepted.", param=at)
    called = message.tool_calls or message.function_call or message.refusal is not None
    if message.content is None and not (message.role == "assistant" and called):
        raise InvalidRequestError("content is required.", param=f"{param}.content")
    if message.role == "tool" and not message.tool_call_id:
        raise InvalidRequestError("a tool message needs tool_call_id.", param=f"{param}.tool_call_id")


def _check_tools(request: ChatRequest) -> None:
    tools = request.tools or []
    for index, tool in enumerate(tools):
        if tool.type != "function" or tool.function is None:
            raise _unsupported(f"tools[{index}].type", "can only be function")
    choice = request.tool_choice
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise InvalidRequestError("tool_choice is none, auto, required or one function.", param="tool_choice")
    if isinstance(choice, NamedTool):
        if choice.type != "function" or choice.function is None:
            raise _unsupported("tool_choice.type", "can only be function")
        if not any(tool.function and tool.function.name == choice.function.name for tool in tools):
            text = "tool_choice names a function that is not among the tools."
            raise InvalidRequestError(text, param="tool_choice")
    if choice in ("auto", "required") and not tools:
        raise InvalidRequestError("tool_choice needs tools.", param="tool_choice")


def _check_structured(request: SamplingFields) -> None:
    structured = request.structured_outputs
    if structured is not None:
        given = [name for name in structured.__struct_fields__ if getattr(structured, name) not in (None, False)]
        if len(given) != 1:
            text = "structured_outputs takes exactly one of json, json_object, regex, choice, grammar."
            raise InvalidRequestError(text, param="structured_outputs")
        if structured.choice == []:
            raise InvalidRequestError("choice must not be empty.", param="structured_outputs.choice")
    formatted = request.response_format
    if formatted is None or formatted.type == "text":
        return
    if structured is not None:
        text = "response_format and structured_outputs exclude each other."
        raise InvalidRequestError(text, param="structured_outputs")
    if formatted.type == "json_schema" and formatted.json_schema is None:
        raise InvalidRequestError("json_schema is required.", param="response_format.json_schema")


def _unsupported(field: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field} {why}.", param=field, code="unsupported_parameter")


RequestT = TypeVar("RequestT", ChatRequest, CompletionRequest)
_DECODERS: Final[dict[type, Callable[[bytes], Any]]] = {
    kind: msgspec.json.Decoder(kind).decode for kind in (ChatRequest, CompletionRequest)
}
_MISSING: Final = re.compile(r"missing required field `([^`]*)`")


def decode(body: bytes, kind: type[RequestT]) -> RequestT:
    """A checked request. Raises InvalidRequestError, whatever the bytes are."""
    request: RequestT = decode_json(body, _DECODERS[kind])
    request.check()
    return request


def decode_json(body: bytes, decoder: Callable[[bytes], Any]) -> Any:
    """`decoder(body)`, with every way in which bytes fail to be its type as an InvalidRequestError."""
    try:
        return decoder(body)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.") from None
    except RecursionError:
        raise InvalidRequestError("The body is nested too deeply.") from None


def _validation_error(text: str) -> InvalidRequestError:
    """msgspec says "Expected `int`, got `str` - at `$.max_tokens`"; the path becomes `param`."""
    reason, _, path = text.partition(" - at `")
    param = path.rstrip("`").removeprefix("$").removeprefix(".")
    if missing := _MISSING.search(reason):
        param = f"{param}.{missing[1]}" if param else missing[1]
        reason = f"{missing[1]} is required"
    if not param:
        return InvalidRequestError(f"The body must be a JSON object: {reason}.")
    return InvalidRequestError(f"{param}: {reason}.", param=param)
