"""The bodies of /v1/responses as chats: their items become messages.

message                                           a message
function_call, custom_tool_call and their outputs a call under the model's name, a tool's message
local_shell_call, shell_call, apply_patch_call    a call that the client ran, and its output
reasoning                                         the thoughts of the message or call after it
web_search_call, file_search_call, mcp_call, ...  dropped and named: a vendor's server ran them
item_reference, compaction, any other             refused: what they stand for is not here
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from server.api.formatting import encode_json
from server.schema import fields as schema
from server.schema.decoding import invalid, unsupported
from server.schema.intent import ChatIntent, Conversation, FieldNames
from server.schema.requests import InputItem, ResponsesRequest, TextOptions
from server.schema.thoughts import thought_text
from server.schema.tools import (
    Ignored,
    ToolKind,
    ToolName,
    ToolSet,
    ToolSpec,
    converted,
    make_tool_set,
    read_choice,
    read_tools,
)
from server.schema.wishes import Wishes

_NAMES: Final = FieldNames(
    messages="input",
    max_tokens="max_output_tokens",
    response_format="text.format",
    tool_schema="parameters",
)
_TOOL_ITEMS: Final = ("additional_tools", "tool_search_output")
"""Items that contain tools."""
_CLIENT_RUN: Final = ("local_shell_call", "shell_call", "apply_patch_call", "tool_search_call")
_SERVER_RUN: Final = frozenset(
    {
        *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_call"),
        *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "program", "program_output"),
    }
)
_GONE: Final = {
    "item_reference": "names a stored item, and nothing is stored here: send the item itself",
    "compaction": "can only be read by the server that wrote it: send the items that it stands for, or a summary",
    "context_compaction": "can only be read by the server that wrote it: send the items that it stands for",
    "compaction_summary": "can only be read by the server that wrote it: send the items that it stands for",
    "compaction_trigger": "asks for a compaction, which is not offered: send what the model should see",
}
_UNKNOWN: Final = "can be message, function_call, custom_tool_call, or an output of such a call"


def responses_intent(request: ResponsesRequest) -> ChatIntent:
    """Raises InvalidRequestError."""
    tool_set = make_tool_set([*read_tools(request.tools or (), nested=False), *_tools_of_items(request.input)])
    mode, tools, named = tool_set.chosen(read_choice(request.tool_choice, tool_set, nested=False))
    messages, dropped = messages_of_items(request, tool_set)
    wishes = Wishes(request.chat_template_kwargs)
    if request.reasoning is not None and request.reasoning.effort is not None:
        wishes.add(request.reasoning.effort, "reasoning.effort")
    conversation = Conversation(
        messages=messages,
        tools=tools,
        template_kwargs=request.chat_template_kwargs or {},
        wishes=wishes,
        names=_NAMES,
    )
    return ChatIntent(
        conversation=conversation,
        fields=request,
        stops=request.stop_strings,
        max_tokens=request.max_output_tokens,
        clamps_max_tokens=True,
        num_top_logprobs=request.num_top_logprobs,
        tool_mode=mode,
        named_tool=named,
        tool_set=tool_set,
        dropped_items=dropped,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        response_format=_format(request.text),
    )


def _format(text: TextOptions | None) -> schema.ResponseFormat | None:
    if text is None or text.format is None:
        return None
    formatted = text.format
    if formatted.type != "json_schema":
        return schema.ResponseFormat(type=formatted.type)
    if formatted.schema is None or not formatted.name:
        raise invalid("text.format", "of type json_schema needs a name and a schema")
    json_schema = schema.JsonSchemaFormat(name=formatted.name, schema=formatted.schema, strict=formatted.strict)
    return schema.ResponseFormat(type="json_schema", json_schema=json_schema)


def _tools_of_items(items: str | Sequence[InputItem]) -> list[ToolSpec | Ignored]:
    """Return the tools in the items. Raises InvalidRequestError."""
    found: list[ToolSpec | Ignored] = []
    for index, item in enumerate(() if isinstance(items, str) else items):
        if item.kind in _TOOL_ITEMS and item.tools:
            path = f"input[{index}].tools"
            if not isinstance(item.tools, list) or not all(isinstance(tool, dict) for tool in item.tools):
                raise invalid(path, "is a list of tools")
            found += read_tools(item.tools, nested=False, path=path)
    return found


def messages_of_items(request: ResponsesRequest, tool_set: ToolSet) -> tuple[list[schema.Message], tuple[Ignored, ...]]:
    """Return the messages, and the items that are left out. Raises InvalidRequestError."""
    messages = [schema.Message(role="system", content=request.instructions)] if request.instructions else []
    dropped: list[Ignored] = []
    items = [InputItem(role="user", content=request.input)] if isinstance(request.input, str) else request.input
    if not items:
        raise invalid("input", "must not be empty")
    thoughts: list[str] = []
    before_results = _before_results(items)
    for index, item in enumerate(items):
        field = f"input[{index}]"
        if item.kind == "reasoning":
            thoughts += filter(None, [thought_text(item.content) or thought_text(item.summary)])
            continue
        if item.kind in _SERVER_RUN:
            dropped.append(Ignored(item.kind, f"{field}.type"))
            continue
        if (message := _message_of(item, field, tool_set)) is None:
            continue
        last = messages[-1] if messages and messages[-1].role == "assistant" else None
        if message.role != "assistant":
            _think(messages, thoughts)
            messages.append(message)
        elif last is not None and (message.tool_calls or (last.tool_calls and before_results[index])):
            _join(last, message)
            thoughts += filter(None, [message.reasoning_content])
        else:
            messages.append(message)
        _think(messages, thoughts)
    _think(messages, thoughts)
    if not messages:
        raise invalid("input", "holds no message")
    return messages, tuple(dropped)


def _before_results(items: Sequence[InputItem]) -> list[bool]:
    """Return for each item whether results of calls come next, after other items of the assistant."""
    found = [False] * len(items)
    for index in range(len(items) - 1, 0, -1):
        kind = items[index].kind
        is_users = kind == "message" and items[index].role != "assistant"
        found[index - 1] = kind.endswith("_output") or (found[index] and not is_users)
    return found


def _join(last: schema.Message, message: schema.Message) -> None:
    """Add a call, or a text after calls, to the turn's message. Thousands take linear time."""
    if message.tool_calls:
        last.tool_calls = last.tool_calls or []
        last.tool_calls += message.tool_calls
    elif not last.content:
        last.content = message.content
    else:
        last.content = _parts(last.content)
        last.content += _parts(message.content or "")


def _parts(content: str | list[schema.TextPart]) -> list[schema.TextPart]:
    return content if isinstance(content, list) else [schema.TextPart(type="text", text=content)]


def _think(messages: list[schema.Message], thoughts: list[str]) -> None:
    """Give the thoughts to the last message, which is the assistant's, or to an empty one."""
    if not thoughts:
        return
    if not messages or messages[-1].role != "assistant":
        messages.append(schema.Message(role="assistant"))
    last = messages[-1]
    last.reasoning_content = "\n".join(filter(None, [last.reasoning_content, *thoughts]))
    thoughts.clear()


def _message_of(item: InputItem, field: str, tool_set: ToolSet) -> schema.Message | None:
    """Return the message of an item; None for one that only has tools. Raises InvalidRequestError."""
    match item.kind:
        case "message":
            return _message(item, field)
        case "function_call" | "custom_tool_call":
            return _tool_call(item, field, tool_set)
        case "function_call_output" | "custom_tool_call_output":
            if not item.call_id:
                raise invalid(f"{field}.call_id", "is required")
            return _result(item.call_id, _output(item.output or "", f"{field}.output"))
        case "tool_search_output":
            names = [str(tool.get("name")) for tool in item.tools or () if isinstance(tool, dict)]
            found = f"Loaded: {', '.join(names)}" if names else "Nothing was found."
            return _result(item.call_id or item.id or "", found)
        case "additional_tools":
            return None
        case kind if kind in _CLIENT_RUN:
            arguments = _as_text(item.action or item.operation or item.arguments or {})
            function = schema.FunctionCall(name=kind.removesuffix("_call"), arguments=arguments)
            return _call(item.call_id or item.id or kind, function)
        case kind if kind.removesuffix("_output") in _CLIENT_RUN:
            output = item.output if item.output is not None else item.status or ""
            return _result(item.call_id or item.id or kind, _as_text(output))
        case kind:
            raise unsupported(f"{field}.type", f"is {kind!r}: it {_GONE[kind]}" if kind in _GONE else _UNKNOWN)


def _message(item: InputItem, field: str) -> schema.Message:
    is_empty = item.content is None and item.role != "assistant"
    if item.role not in ("system", "developer", "user", "assistant") or is_empty:
        raise invalid(field, "is a message without role (system, developer, user, assistant) or content")
    if isinstance(item.content, list):
        schema.check_parts(item.content, f"{field}.content", may_think=item.role == "assistant")
    return schema.Message(role=item.role, content=item.content).with_thoughts()


def _tool_call(item: InputItem, field: str, tool_set: ToolSet) -> schema.Message:
    kind: ToolKind = "function" if item.kind == "function_call" else "custom"
    key, text = ("arguments", item.arguments) if kind == "function" else ("input", item.input)
    if not (item.call_id and item.name) or not isinstance(text, str):
        raise invalid(field, f"is a {item.kind} without call_id, name or {key}")
    return _call(item.call_id, tool_set.call(ToolName(item.name, kind, item.namespace or None), text))


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else encode_json(value).decode()


def _result(call_id: str, content: str | list[schema.TextPart]) -> schema.Message:
    return schema.Message(role="tool", tool_call_id=call_id, content=content)


def _call(id_: str, function: schema.FunctionCall) -> schema.Message:
    return schema.Message(role="assistant", tool_calls=[schema.ToolCall(id=id_, function=function)])


def _output(output: object, field: str) -> str | list[schema.TextPart]:
    if isinstance(output, str):
        return output
    parts = converted(output, list[schema.TextPart], field)
    schema.check_parts(parts, field)
    return schema.as_text(parts)
