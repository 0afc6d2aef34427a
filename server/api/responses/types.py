"""The body of /v1/responses, checked and turned into a chat request: both are answered by one path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta, Struct

from server.errors import InvalidRequestError
from server.schema.decoding import decode_json, unsupported
from server.schema.fields import ModelFields, PositiveCount, ReasoningEffort, TopLogprobs
from server.schema.parts import (
    MAX_TOOLS,
    AllowedTool,
    AllowedTools,
    FormatType,
    FunctionCall,
    FunctionDefinition,
    JsonSchemaFormat,
    Message,
    NamedFunction,
    ResponseFormat,
    TextPart,
    Tool,
    ToolCall,
)
from server.schema.parts import ToolChoice as ChatToolChoice
from server.schema.types import ChatRequest

LOGPROBS: Final = "message.output_text.logprobs"


class InputItem(Struct, kw_only=True):
    type: str = "message"
    role: str | None = None
    content: str | list[TextPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[TextPart] | None = None
    id: str | None = None
    status: str | None = None


class FunctionTool(Struct, kw_only=True):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(Struct, kw_only=True):
    type: str
    name: str | None = None


class ToolChoice(Struct, kw_only=True):
    """One function (`type` function), or some of the tools (`type` allowed_tools)."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ChosenTool] | None = None


class TextFormat(Struct, kw_only=True):
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
    """`max_output_tokens` and `text.format` are called max_completion_tokens and response_format in chats."""

    hints: ClassVar[frozenset[str]] = ModelFields.hints | {"include", "stream_options"}
    refused: ClassVar[Mapping[str, str]] = {
        **ModelFields.refused,
        "background": "needs stored responses, which this server does not keep",
        "context_management": "is not offered: send what the model shall see",
        "conversation": "needs stored conversations, which this server does not keep: send the whole input",
        "max_tool_calls": "concerns built-in tools, which are not offered",
        "previous_response_id": "needs stored responses, which this server does not keep: send the whole input",
        "prompt": "needs stored prompts, which this server does not keep: send instructions and input",
    }

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: PositiveCount | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    top_logprobs: TopLogprobs | None = None
    include: list[str] | None = None
    stream_options: dict[str, Any] | None = None

    background: Any = None
    context_management: Any = None
    conversation: Any = None
    max_tool_calls: Any = None
    previous_response_id: Any = None
    prompt: Any = None

    @property
    def num_top_logprobs(self) -> int | None:
        """None: no log probabilities are asked for."""
        asked = self.top_logprobs is not None or LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if asked else None


_DECODER: Final = msgspec.json.Decoder(ResponsesRequest)
_SHARED: Final = tuple(field for field in ModelFields.__struct_fields__ if field not in ModelFields.refused)
FIELD_NAMES: Final = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""What chats call it, and what it is called here."""


def decode_responses(body: bytes, *, inspected: bool = False) -> tuple[ResponsesRequest, ChatRequest]:
    """The request and the chat request that it stands for. Raises InvalidRequestError."""
    request: ResponsesRequest = decode_json(body, _DECODER.decode, inspected=inspected)
    request.check_fields()
    if request.truncation == "auto":
        raise unsupported("truncation", "can only be disabled")
    chat = _chat_request(request)
    with errors_renamed():
        chat.check()
    return request, chat


@contextmanager
def errors_renamed() -> Iterator[None]:
    """Errors of the chat request name the fields of this route."""
    try:
        yield
    except InvalidRequestError as error:
        name, dot, rest = (error.param or "").partition(".")
        name, bracket, index = name.partition("[")
        error.param = f"{FIELD_NAMES.get(name, name)}{bracket}{index}{dot}{rest}" or None
        raise


def _chat_request(request: ResponsesRequest) -> ChatRequest:
    tools = [_tool(tool, index) for index, tool in enumerate(request.tools or ())]
    num_top = request.num_top_logprobs
    without_tools = request.tool_choice if request.tool_choice not in ("auto", "none") else None
    return ChatRequest(
        **{field: getattr(request, field) for field in _SHARED},
        messages=_messages(request),
        max_completion_tokens=request.max_output_tokens,
        tools=tools or None,
        tool_choice=_tool_choice(request.tool_choice if tools else without_tools),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format(request.text),
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        logprobs=num_top is not None,
        top_logprobs=num_top,
    )


def _messages(request: ResponsesRequest) -> list[Message]:
    messages = [] if request.instructions is None else [Message(role="system", content=request.instructions)]
    items = [InputItem(role="user", content=request.input)] if isinstance(request.input, str) else request.input
    if not items:
        raise InvalidRequestError("input must not be empty.", param="input")
    for index, item in enumerate(items):
        match item.type:
            case "message":
                if item.role not in ("system", "developer", "user", "assistant") or item.content is None:
                    text = "a message has a role (system, developer, user, assistant) and content."
                    raise InvalidRequestError(text, param=f"input[{index}]")
                messages.append(Message(role=item.role, content=item.content))
            case "function_call":
                if not (item.call_id and item.name) or item.arguments is None:
                    text = "a function_call has call_id, name and arguments."
                    raise InvalidRequestError(text, param=f"input[{index}]")
                call = ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))
                _add_call(messages, call)
            case "function_call_output":
                if not item.call_id or item.output is None:
                    text = "a function_call_output has call_id and output."
                    raise InvalidRequestError(text, param=f"input[{index}]")
                messages.append(Message(role="tool", tool_call_id=item.call_id, content=item.output))
            case "reasoning":
                continue  # templates drop the thoughts of earlier turns
            case _:
                raise unsupported(f"input[{index}].type", "can be message, function_call or function_call_output")
    if not messages:
        raise InvalidRequestError("input holds no message.", param="input")
    return messages


def _add_call(messages: list[Message], call: ToolCall) -> None:
    """Calls in a row are those of one assistant's message."""
    if messages and messages[-1].role == "assistant":
        messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]
    else:
        messages.append(Message(role="assistant", tool_calls=[call]))


def _tool(tool: FunctionTool, index: int) -> Tool:
    if tool.type != "function" or not tool.name:
        raise unsupported(f"tools[{index}].type", "can only be function, with a name")
    fields = {"name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    try:
        function = msgspec.convert(fields, FunctionDefinition)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"tools[{index}]: {error}.", param=f"tools[{index}]") from None
    return Tool(type="function", function=function)


def _tool_choice(choice: str | ToolChoice | None) -> str | ChatToolChoice | None:
    if not isinstance(choice, ToolChoice):
        return choice
    if choice.type == "function" and choice.name:
        return ChatToolChoice(type="function", function=NamedFunction(name=choice.name))
    if choice.type != "allowed_tools" or not choice.tools:
        raise unsupported("tool_choice.type", "can only be function or allowed_tools")
    named = [AllowedTool(type=tool.type, function=NamedFunction(name=tool.name or "")) for tool in choice.tools]
    return ChatToolChoice(type="allowed_tools", allowed_tools=AllowedTools(mode=choice.mode or "auto", tools=named))


def _format(text: TextOptions | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    formatted = text.format
    if formatted.type != "json_schema":
        return ResponseFormat(type=formatted.type)
    if formatted.schema is None or not formatted.name:
        raise InvalidRequestError("a json_schema format has a name and a schema.", param="text.format")
    return ResponseFormat(
        type="json_schema", json_schema=JsonSchemaFormat(name=formatted.name, schema=formatted.schema)
    )
