"""The bodies of /v1/messages and /v1/messages/count_tokens.

Source: the reference of Anthropic's Messages API, https://platform.claude.com/docs/en/api/messages. The sampling fields
of the other routes are honoured, too. A field that is not supported and would change the answer is refused by
name, also in blocks and tools.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta, Struct

from server.schema.blocks import NOT_TEXT
from server.schema.decoding import invalid, unsupported
from server.schema.fields import MAX_TOOLS, Count, ModelFields, Part, PositiveCount, Probability, check_stops
from server.schema.requests import MAX_MESSAGES, BodyDecoder
from server.schema.tools import Ignored, ToolSet, ToolSpec, make_tool_set, read_tool

MessageRole = Literal["user", "assistant", "system"]
_BLOCKS: Final[dict[MessageRole, tuple[str, ...]]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
"""The types of blocks that each role's content may have."""
_TOOL_FIELDS: Final = ("name", "description", "strict", "allowed_callers")
"""Fields that describe a tool of a client in every API."""
_SERVER_CALLS: Final = ("server_tool_use", "mcp_tool_use", "mcp_tool_listing", "fallback")


class ContentBlock(Part, kw_only=True):
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = msgspec.Raw(b"")
    """JSON as the client wrote it."""
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | dict[str, Any] | None = None
    tool_name: str | None = None
    title: str | None = None
    is_error: bool | None = None
    cache_control: Any = None

    @property
    def is_server_run(self) -> bool:
        """A call that a vendor's server ran, or its result."""
        return self.type in _SERVER_CALLS or (self.type != "tool_result" and self.type.endswith("_tool_result"))

    def check(self, field: str, allowed: tuple[str, ...]) -> None:
        """Raises InvalidRequestError; `field` is the block's path."""
        if self.type in NOT_TEXT and allowed != _BLOCKS["system"]:
            return
        if self.is_server_run and "tool_use" in allowed:
            return
        if self.type not in allowed:
            raise unsupported(f"{field}.type", f"is {self.type[:64]!r}, and can here be {' or '.join(allowed)}")
        if self.type == "text" and self.text is None:
            raise invalid(f"{field}.text", "is required")
        if self.type == "tool_reference" and not self.tool_name:
            raise invalid(f"{field}.tool_name", "is required")
        if self.type == "tool_use":
            if not (self.id and self.name):
                raise invalid(field, "is a tool_use without id or name")
            if not bytes(self.input):  # a model may have written no object, and clients send its answer back
                raise invalid(f"{field}.input", "is required")
        if self.type == "tool_result":
            if not self.tool_use_id:
                raise invalid(f"{field}.tool_use_id", "is required")
            if isinstance(self.content, list):
                for index, part in enumerate(self.content):
                    part.check(f"{field}.content[{index}]", ("text", "tool_reference"))
            elif isinstance(self.content, dict):
                raise invalid(f"{field}.content", "must be a text or a list of blocks")


class InputMessage(Struct, kw_only=True):
    role: MessageRole
    content: str | list[ContentBlock]

    def check(self, field: str) -> None:
        """Raises InvalidRequestError; `field` is the message's path."""
        if self.content == [] and self.role != "assistant":  # an answer may be empty, and comes back as it was
            raise invalid(f"{field}.content", "must not be empty")
        if isinstance(self.content, list):
            for index, block in enumerate(self.content):
                block.check(f"{field}.content[{index}]", _BLOCKS[self.role])


class MessagesToolChoice(Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: PositiveCount | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None
    block_binding: dict[str, Any] | None = None


class JsonOutputFormat(Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutputFormat | None = None
    task_budget: dict[str, Any] | None = None


class ContextEdit(Struct, kw_only=True):
    type: str


class ContextManagement(Struct, kw_only=True, forbid_unknown_fields=True):
    edits: list[ContextEdit] | None = None

    def check(self) -> None:
        """Accept only edits that drop thoughts, as templates do. Raises InvalidRequestError."""
        if any(not edit.type.startswith("clear_thinking") for edit in self.edits or ()):
            raise unsupported("context_management.edits", "can only clear thinking: send what the model should see")


class MessagesMetadata(Struct, kw_only=True):
    user_id: Annotated[str, Meta(max_length=1024)] | None = None


class CountTokensRequest(ModelFields, kw_only=True):
    """The fields that the prompt depends on, and others that a client may send."""

    text_field: ClassVar = "messages"

    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[ContentBlock] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    mcp_servers: list[Any] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutputFormat | None = None
    """The older name of `output_config.format`."""
    context_management: ContextManagement | None = None
    stop_sequences: list[str] | None = None
    temperature: Probability | None = None
    metadata: MessagesMetadata | None = None  # type: ignore[assignment]
    service_tier: Literal["auto", "standard_only"] | None = None  # type: ignore[assignment]

    def tool_set(self) -> ToolSet:
        """Return the tools. Only Anthropic's models can use those with a type of their own."""
        read = [_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(self.tools or ())]
        servers = [Ignored("mcp_servers", "mcp_servers")] if self.mcp_servers else []
        return make_tool_set([*read, *servers])

    @property
    def affinity_key(self) -> str | None:
        return self.prompt_cache_key or (self.metadata and self.metadata.user_id) or self.user

    def _cache_controls(self) -> Iterator[dict[str, Any]]:
        contents: list[Any] = [self.system, *(message.content for message in self.messages)]
        controls = [self.cache_control, *(tool.get("cache_control") for tool in self.tools or ())]
        for content in contents:  # which grows
            for block in content if isinstance(content, list) else ():
                controls.append(block.cache_control)
                contents.append(block.content)
        yield from (control for control in controls if isinstance(control, dict))

    def check(self) -> None:
        if self.structured_outputs is not None:
            self.structured_outputs.check()
        if self.stop is not None:
            raise unsupported("stop", "is not offered here: use stop_sequences")
        check_stops("stop_sequences", self.stop_sequences or ())
        if isinstance(self.system, list):
            for index, block in enumerate(self.system):
                block.check(f"system[{index}]", _BLOCKS["system"])
        if self.context_management is not None:
            self.context_management.check()
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise invalid("output_format", "and output_config.format exclude each other")
        if self.tool_choice is not None and self.tool_choice.type == "tool" and not self.tool_choice.name:
            raise invalid("tool_choice.name", "is required")
        last = self.messages[-1]
        blocks = last.content if last.role == "assistant" and isinstance(last.content, list) else []
        if any(block.type == "tool_use" for block in blocks):
            raise invalid("messages", "end with a tool_use: send its tool_result in a message of the user")


def _read_tool(given: dict[str, Any], field: str) -> ToolSpec | Ignored:
    kind = given.get("type")
    if isinstance(kind, str) and kind != "custom":
        name = given.get("name")
        return Ignored(kind, f"{field}.type", name if isinstance(name, str) else None)
    if given.get("input_examples"):
        raise unsupported(f"{field}.input_examples", "is not offered: put examples into the description")
    schema = given.get("input_schema")
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise invalid(f"{field}.input_schema", "must be a JSON schema with type: object")
    function = {"type": "function", "parameters": schema}
    function |= {name: given[name] for name in _TOOL_FIELDS if name in given}
    return read_tool(function, field, nested=False)


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Count
    """0: the prompt is computed and cached, and the answer is empty."""


MESSAGES: Final = BodyDecoder(MessagesRequest, "/v1/messages")
COUNT_TOKENS: Final = BodyDecoder(CountTokensRequest, "/v1/messages", ignored=("compaction",))
