"""The chat that a client asks for, in one form for all APIs with chats.

Each route makes a `ChatIntent` of its own body. The intent has the route's field names, so that a later error names
the field that the client sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from server.schema.decoding import invalid
from server.schema.fields import FunctionDefinition, LeftOut, Message, ModelFields, ResponseFormat, check_constraints
from server.schema.tools import Ignored, ToolMode, ToolSet
from server.schema.wishes import Wishes


@dataclass(frozen=True, slots=True)
class FieldNames:
    """A route's names for the fields of every chat API."""

    messages: str = "messages"
    max_tokens: str = "max_tokens"
    response_format: str = "response_format"
    continue_final_message: str = "continue_final_message"
    tool_schema: str = "function.parameters"


CHAT_NAMES: Final = FieldNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The input of a chat template."""

    messages: list[Message]
    tools: Sequence[FunctionDefinition] = ()
    """Those that the model sees."""
    is_continued: bool = False
    """The answer continues the last message, which is the assistant's."""
    add_generation_prompt: bool = True
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    wishes: Wishes = field(default_factory=Wishes)
    """Those about thoughts, of the switches and the fields."""
    names: FieldNames = CHAT_NAMES
    num_removed: int = 0
    """Messages of the client that were removed from the beginning."""

    def param_of(self, number: int, path: str) -> str:
        """Return an error's `param`: in chat the path of a message's part, else the route's field of messages."""
        return f"messages[{number + self.num_removed}].{path}" if self.names is CHAT_NAMES else self.names.messages


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatIntent:
    """A checked request of a chat API."""

    conversation: Conversation
    fields: ModelFields
    """The fields that have one name in every route, with the client's values."""
    stops: tuple[str, ...] = ()
    num_choices: int = 1
    max_tokens: int | None = None
    clamps_max_tokens: bool = False
    """`max_tokens` is an upper bound, as in /v1/messages and /v1/responses: the context may have room for less."""
    num_top_logprobs: int | None = None
    """None: no log probabilities are asked for."""
    num_prompt_logprobs: int | None = None
    tool_mode: ToolMode = "none"
    named_tool: FunctionDefinition | None = None
    """The one function that has to be called, in the mode `named`."""
    tool_set: ToolSet = field(default_factory=ToolSet)
    """The names and the grammars of the tools."""
    dropped_items: tuple[Ignored, ...] = ()
    """Items of the history that only a vendor's server could read."""
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None

    @property
    def names(self) -> FieldNames:
        return self.conversation.names

    @property
    def ignored(self) -> tuple[Ignored, ...]:
        return (*self.tool_set.ignored, *self.dropped_items, *self._ignored_parts())

    def _ignored_parts(self) -> Iterator[Ignored]:
        for number, message in enumerate(self.conversation.messages):
            for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
                if isinstance(part, LeftOut):
                    field = self.conversation.param_of(number, f"content[{index}].type")
                    yield Ignored(part.kind, field, is_block=True)

    def __post_init__(self) -> None:
        """Check the rules that involve several fields. Raises InvalidRequestError."""
        structured, name = self.fields.structured_outputs, self.names.response_format
        check_constraints(structured, self.response_format, name)
        if structured is not None and self.tool_mode != "none":
            why = f"would keep the model from calling tools: use {name} or tool_choice none"
            raise invalid("structured_outputs", why)
