"""The body of /v1/responses, checked and turned into a chat request: both are answered by one path."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from server.errors import InvalidRequestError
from server.openai_types import (
    ChatRequest,
    FunctionCall,
    FunctionDefinition,
    JsonSchemaFormat,
    Message,
    NamedFunction,
    NamedTool,
    Probability,
    ResponseFormat,
    ShortText,
    TextPart,
    Tool,
    ToolCall,
    decode_json,
)


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


class ToolChoice(Struct, kw_only=True):
    type: str
    name: str | None = None


class TextFormat(Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(Struct, kw_only=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(Struct, kw_only=True):
    model: Annotated[str, Meta(min_length=1, max_length=1024)]
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    stream: bool | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=128)] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, Annotated[str, Meta(max_length=512)]] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    store: bool | None = None
    include: list[str] | None = None
    stream_options: Any = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None

    previous_response_id: Any = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    max_tool_calls: Any = None


_DECODER: Final = msgspec.json.Decoder(ResponsesRequest)
_STATEFUL: Final = {
    "previous_response_id": "needs stored responses, which this server does not keep: send the whole input",
    "conversation": "needs stored conversations, which this server does not keep: send the whole input",
    "prompt": "needs stored prompts, which this server does not keep: send instructions and input",
    "max_tool_calls": "concerns built-in tools, which are not offered",
}


def decode_responses(body: bytes) -> tuple[ResponsesRequest, ChatRequest]:
    """The request and the chat request that it stands for. Raises InvalidRequestError."""
    request: ResponsesRequest = decode_json(body, _DECODER.decode)
    for field, why in _STATEFUL.items():
        if getattr(request, field) is not None:
            raise _unsupported(field, why)
    if request.background:
        raise _unsupported("background", "needs stored responses, which this server does not keep")
    if request.truncation == "auto":
        raise _unsupported("truncation", "can only be disabled")
    if request.top_logprobs or (request.include and "message.output_text.logprobs" in request.include):
        raise _unsupported("top_logprobs", "is not offered here: use /v1/chat/completions")
    chat = _chat_request(request)
    chat.check()
    return request, chat


def _chat_request(request: ResponsesRequest) -> ChatRequest:
    tools = [_tool(tool, index) for index, tool in enumerate(request.tools or ())]
    return ChatRequest(
        model=request.model,
        messages=_messages(request),
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        stream=request.stream,
        tools=tools or None,
        tool_choice=_tool_choice(request.tool_choice) if tools else None,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format(request.text),
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        metadata=request.metadata,
        cache_salt=request.cache_salt,
        prompt_cache_key=request.prompt_cache_key,
        safety_identifier=request.safety_identifier,
        user=request.user,
        seed=request.seed,
        service_tier=request.service_tier,
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
                raise _unsupported(f"input[{index}].type", "can be message, function_call or function_call_output")
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
        raise _unsupported(f"tools[{index}].type", "can only be function, with a name")
    fields = {"name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    try:
        function = msgspec.convert(fields, FunctionDefinition)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"tools[{index}]: {error}.", param=f"tools[{index}]") from None
    return Tool(type="function", function=function)


def _tool_choice(choice: str | ToolChoice | None) -> str | NamedTool | None:
    if not isinstance(choice, ToolChoice):
        return choice
    if choice.type != "function" or not choice.name:
        raise _unsupported("tool_choice.type", "can only be function, with a name")
    return NamedTool(type="function", function=NamedFunction(name=choice.name))


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


def _unsupported(field: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field} {why}.", param=field, code="unsupported_parameter")
