"""What the bodies of the API are made of: messages, tools, and what an answer is held to."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from server.errors import InvalidRequestError
from server.schema.decoding import unsupported

ROLES: Final = ("developer", "system", "user", "assistant", "tool", "function")
MAX_TOOLS: Final = 128

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
FormatType = Literal["text", "json_object", "json_schema"]


class TextPart(Struct, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def readable(self) -> bool:
        if self.type == "refusal":
            return self.refusal is not None
        return self.type in ("text", "input_text", "output_text") and self.text is not None


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

    def check(self) -> None:
        """Raises InvalidRequestError; its `param` is a field of the message."""
        if self.role not in ROLES:
            raise InvalidRequestError(f"role must be one of {', '.join(ROLES)}.", param="role")
        if self.audio is not None:
            raise unsupported("audio", "is not offered: this model reads text")
        if isinstance(self.content, list):
            for index, part in enumerate(self.content):
                if not part.readable:
                    at = f"content[{index}].type"
                    raise InvalidRequestError("this model reads text: only parts of type text are accepted.", param=at)
        called = self.tool_calls or self.function_call or self.refusal is not None
        if self.content is None and not (self.role == "assistant" and called):
            raise InvalidRequestError("content is required.", param="content")
        if self.role == "tool" and not self.tool_call_id:
            raise InvalidRequestError("a tool message needs tool_call_id.", param="tool_call_id")


class FunctionDefinition(Struct, kw_only=True):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, kw_only=True):
    type: str
    function: FunctionDefinition | None = None

    @property
    def name(self) -> str:
        """Empty for what is no function."""
        return "" if self.function is None else self.function.name

    @property
    def parameters(self) -> dict[str, Any]:
        """The schema of its arguments."""
        return (self.function and self.function.parameters) or {"type": "object"}


class NamedFunction(Struct, kw_only=True):
    name: str


class AllowedTool(Struct, kw_only=True):
    type: str
    function: NamedFunction | None = None


class AllowedTools(Struct, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class ToolChoice(Struct, kw_only=True):
    """One function (`type` function), or some of the tools (`type` allowed_tools)."""

    type: str
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class JsonSchemaFormat(Struct, kw_only=True):
    name: Name
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Struct, kw_only=True):
    type: FormatType
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Struct, kw_only=True):
    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: Annotated[str, Meta(max_length=65_536)] | None = None
    choice: list[str] | None = None
    grammar: Annotated[str, Meta(max_length=1_000_000)] | None = None

    def check(self) -> None:
        """Raises InvalidRequestError."""
        given = [name for name in self.__struct_fields__ if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            text = "structured_outputs takes exactly one of json, json_object, regex, choice, grammar."
            raise InvalidRequestError(text, param="structured_outputs")
        if self.choice == []:
            raise InvalidRequestError("choice must not be empty.", param="structured_outputs.choice")


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
