"""The parts of request bodies, and the fields that several routes share.

RequestFields            the fields of every route that runs a model, with those of its CallerFields
+-- ModelFields          the fields of every generating route, /v1/responses included
    +-- SamplingFields   the fields that chats and completions share: see `server.schema.requests`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

from server.schema.blocks import NOT_TEXT, block_text
from server.schema.decoding import NULL, invalid, unsupported
from server.schema.thoughts import PART_TYPES, thought_text

_TEXT_TYPES: Final = ("text", "input_text", "output_text")
ROLES: Final = ("developer", "system", "user", "assistant", "tool", "function")
MAX_TOOLS: Final = 1024  # agents with several MCP servers pass OpenAI's limit of 128
MAX_STOPS: Final = 32
"""OpenAI takes 4 and Anthropic 16; agents that complete code send a dozen to any other server."""
MAX_STOP_CHARS: Final = 1024  # text that may be a stop string is held back

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
PositiveCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Name = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-]{1,64}\Z")]
ShortText = Annotated[str, Meta(max_length=64)]
FormatType = Literal["text", "json_object", "json_schema"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Part(Struct, kw_only=True):
    """The fields of a part in every API. Its type decides which count."""

    type: str
    text: str | None = None
    thinking: Any = None
    title: Any = None
    source: Raw = NULL
    image_url: Raw = NULL
    detail: Any = None
    content: Any = None


class TextPart(Part, kw_only=True):
    refusal: str | None = None
    reasoning: Any = None
    reasoning_content: Any = None
    summary: Any = None

    @property
    def readable(self) -> bool:
        if self.type == "refusal":
            return self.refusal is not None
        return self.type in _TEXT_TYPES and self.text is not None


class LeftOut(TextPart, kw_only=True):
    """A line for a part that a model of text cannot read."""

    kind: str
    part: Part
    """The client's."""


def as_text(parts: list[TextPart]) -> list[TextPart]:
    """Return checked parts, each as text."""
    if not any(part.type in NOT_TEXT for part in parts):
        return parts
    return [text_part(part, part.content) if part.type in NOT_TEXT else part for part in parts]


def text_part(part: Part, content: object) -> TextPart:
    """Return the text for a part of one of the types `NOT_TEXT`. `content`: its parts."""
    text, is_whole = block_text(part.type, part.title, part.source, content)
    if is_whole:
        return TextPart(type="text", text=text)
    return LeftOut(type="text", text=text, kind=part.type, part=part)


class FunctionCall(Struct, kw_only=True):
    name: str
    arguments: str | None = None
    """JSON of an object. None or "": a call without arguments."""
    namespace: str | None = None


class CustomCall(Struct, kw_only=True):
    name: str
    input: str
    namespace: str | None = None


class ToolCall(Struct, kw_only=True):
    id: str
    type: Literal["function", "custom"] | None = None
    """None: a function."""
    function: FunctionCall | None = None
    custom: CustomCall | None = None

    @property
    def called(self) -> FunctionCall:
        """The function's call, which a conversation has in every call."""
        assert self.function is not None, "checked with the message"
        return self.function


class Message(Struct, kw_only=True):
    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_details: Any = None
    thinking_blocks: Any = None
    refusal: str | None = None
    audio: Any = None
    prefix: Any = None
    partial: Any = None

    def check(self, field: str) -> None:
        """Raises InvalidRequestError; `field` is the message's path."""
        if self.role not in ROLES:
            raise invalid(f"{field}.role", f"must be one of {', '.join(ROLES)}")
        if self.prefix or self.partial:
            name = "prefix" if self.prefix else "partial"
            raise unsupported(f"{field}.{name}", "is not offered: use continue_final_message")
        if self.audio is not None:
            raise unsupported(f"{field}.audio", "is not offered: this model reads text")
        if isinstance(self.content, list):
            check_parts(self.content, f"{field}.content", may_think=self.role == "assistant")
        elif self.content is None and self.role not in ("assistant", "tool", "function"):  # these may be empty
            raise invalid(f"{field}.content", "is required")
        for index, call in enumerate(self.tool_calls or ()):
            if (call.custom if call.type == "custom" else call.function) is None:
                raise invalid(f"{field}.tool_calls[{index}].{call.type or 'function'}", "is required")
        if self.role == "tool" and self.tool_call_id is None:
            raise invalid(f"{field}.tool_call_id", "is required in a tool message")

    def with_thoughts(self) -> Message:
        """Return the message with its parts as text, and its thoughts in one field, `reasoning_content`."""
        content, parts = self.content, []
        if isinstance(content, list):
            content = as_text(content)
            parts = [part for part in content if part.type in PART_TYPES]
            content = [part for part in content if part.type not in PART_TYPES] if parts else content
        given = (self.reasoning_content, self.reasoning, parts, self.thinking_blocks, self.reasoning_details)
        thoughts = next(filter(None, map(thought_text, given)), None)
        if content is self.content and thoughts == self.reasoning_content:
            return self
        return replace(self, content=content, reasoning_content=thoughts, reasoning=None)


def check_parts(parts: Sequence[TextPart], field: str, *, may_think: bool = False) -> None:
    """Raises InvalidRequestError; `field` is the path of the parts."""
    for index, part in enumerate(parts):
        if part.readable or part.type in NOT_TEXT or (may_think and part.type in PART_TYPES):
            continue
        if part.type in _TEXT_TYPES:
            raise invalid(f"{field}[{index}].text", "is required")
        raise invalid(f"{field}[{index}].type", "must be text: this model reads text")


class FunctionDefinition(Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def arguments_schema(self) -> dict[str, Any]:
        return {"type": "object"} | (self.parameters or {})


class JsonSchemaFormat(Struct, kw_only=True):
    name: Name
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Struct, kw_only=True):
    """A format. Servers other than OpenAI have the schema in `schema` (llama.cpp, Fireworks) or `value` (TGI)."""

    type: FormatType
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None
    value: dict[str, Any] | None = None

    @property
    def given_schema(self) -> tuple[str, dict[str, Any]] | None:
        """The schema, wherever it is given, after the field that holds it."""
        nested = None if self.json_schema is None else self.json_schema.schema
        schemas = {"json_schema.schema": nested, "schema": self.schema, "value": self.value}
        return next(((name, schema) for name, schema in schemas.items() if schema is not None), None)

    def check(self) -> None:
        """Raises InvalidRequestError."""
        given = [name for name in ("json_schema", "schema", "value") if getattr(self, name) is not None]
        if len(given) > 1:
            raise invalid(f"response_format.{given[1]}", f"and {given[0]} exclude each other")
        if given and (self.type == "text" or (self.type == "json_object" and self.json_schema is not None)):
            raise invalid(f"response_format.{given[0]}", "needs the type json_schema")
        if self.type == "json_schema" and self.given_schema is None:
            name = "json_schema" if self.json_schema is None else "json_schema.schema"
            raise invalid(f"response_format.{name}", "is required")


_CONSTRAINTS: Final = ("json", "json_object", "regex", "choice", "grammar")


class StructuredOutputs(Struct, kw_only=True):
    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: Annotated[str, Meta(max_length=65_536)] | None = None
    choice: list[str] | None = None
    grammar: Annotated[str, Meta(max_length=1_000_000)] | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_additional_properties: bool | None = None
    structural_tag: Any = None

    def given(self) -> list[str]:
        """Name the constraints that the client gives."""
        return [name for name in _CONSTRAINTS if getattr(self, name) not in (None, False)]

    def check(self) -> None:
        """Raises InvalidRequestError."""
        for name in ("whitespace_pattern", "disable_additional_properties", "structural_tag"):
            if getattr(self, name):
                raise unsupported(f"structured_outputs.{name}", "is not offered")
        if len(self.given()) != 1:
            raise invalid("structured_outputs", f"takes exactly one of {', '.join(_CONSTRAINTS)}")
        if self.disable_any_whitespace and not self.given()[0].startswith("json"):
            raise invalid("structured_outputs.disable_any_whitespace", "needs json or json_object")
        if self.choice == []:
            raise invalid("structured_outputs.choice", "must not be empty")


def check_constraints(structured: StructuredOutputs | None, formatted: ResponseFormat | None, field: str) -> None:
    """Check that at most one of both constrains the answer. Raises InvalidRequestError."""
    if structured is not None and formatted is not None and formatted.type != "text":
        raise invalid("structured_outputs", f"and {field} exclude each other")


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


def check_stops(field: str, stops: Sequence[str]) -> None:
    """Raises InvalidRequestError."""
    if len(stops) > MAX_STOPS:
        raise invalid(field, f"takes at most {MAX_STOPS} strings")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise invalid(field, f"takes strings of 1 to {MAX_STOP_CHARS} characters")


class CallerFields(Struct, kw_only=True):
    """The fields of a body about its caller."""

    cache_salt: str | None = None
    priority: int | None = None
    prompt_cache_key: str | None = None
    user: str | None = None

    @property
    def affinity_key(self) -> str | None:
        """The body's key for the conversation or user of the request."""
        return self.prompt_cache_key or self.user


class RequestFields(CallerFields, kw_only=True):
    """The fields of every route that runs a model, hints included."""

    text_field: ClassVar[str]
    """The field that holds the text."""

    model: Annotated[str, Meta(min_length=1, max_length=1024)]
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None

    cache_control: Any = None
    metadata: dict[str, Annotated[str, Meta(max_length=512)]] | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: ShortText | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    store: bool | None = None

    @property
    def ignored_hints(self) -> list[str]:
        """Lifetimes that the client asks for: every prompt is cached for as long as there is room."""
        hints = [] if self.prompt_cache_retention is None else ["prompt_cache_retention"]
        if any(control.get("ttl") is not None for control in self._cache_controls()):
            hints.append("cache_control.ttl")
        return hints

    def _cache_controls(self) -> Iterator[dict[str, Any]]:
        """Yield every `cache_control` of the body that is an object."""
        if isinstance(self.cache_control, dict):
            yield self.cache_control

    def check(self) -> None:
        """Check the rules that no single field's type holds. Raises InvalidRequestError."""
        if self.metadata is not None and (len(self.metadata) > 16 or any(len(key) > 64 for key in self.metadata)):
            raise invalid("metadata", "takes 16 pairs with keys of 64 characters")


class ModelFields(RequestFields, kw_only=True):
    """The fields of every generating route, vLLM's extensions included."""

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
    repetition_penalty: Annotated[float, Meta(ge=1e-6, le=100)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Annotated[list[str], Meta(max_length=1024)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=1_000_000)] | None = None
    truncate_prompt_tokens: PositiveCount | None = None
    truncation_side: Literal["left", "right"] | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check(self) -> None:
        RequestFields.check(self)
        check_stops("stop", self.stop_strings)
        if self.structured_outputs is not None:
            self.structured_outputs.check()


class SamplingFields(ModelFields, kw_only=True):
    """The fields that chats and completions share."""

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
        ModelFields.check(self)
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs", "is not available with stream: true")
        if self.response_format is not None:
            self.response_format.check()
        check_constraints(self.structured_outputs, self.response_format, "response_format")
