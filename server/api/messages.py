"""/v1/messages and /v1/messages/count_tokens: Anthropic's Messages API.

A body becomes the intent of a chat, and both routes share one path to the worker. So a conversation renders to the same
prompt by either, and finds the same cache. A message of blocks becomes several of a chat's:

    user         [tool_result, tool_result, text]     tool, tool, user
    assistant    [thinking, text, tool_use]           assistant, with its thoughts and its calls

The answer is a list of content blocks, and each step is an event:

    message_start, ping, blocks ..., message_delta, message_stop
    content_block_start, content_block_delta ..., content_block_stop
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from server.api.chat import ConversationEndpoint
from server.api.formatting import ItemFormatter, encode_json
from server.errors import ApiError, anthropic_error
from server.event_loop import sliced
from server.http.stream import sse
from server.request.choice import ChoiceDelta, GenerationSpec
from server.request.response import ResponseStream
from server.request_context import CURRENT
from server.schema import fields as schema
from server.schema.blocks import NOT_TEXT
from server.schema.decoding import TextLimit, decode_text, invalid
from server.schema.intent import ChatIntent, Conversation, FieldNames
from server.schema.messages import (
    COUNT_TOKENS,
    MESSAGES,
    ContentBlock,
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
)
from server.schema.thoughts import thought_text
from server.schema.tools import Ignored, ToolMode, ToolName, ToolUse
from server.schema.wishes import Wishes
from server.text.output_parser import OutputRules, call_id
from server.text.shapes import NOT_JSON

_NAMES: Final = FieldNames(
    response_format="output_config.format",
    continue_final_message="messages",
    tool_schema="input_schema",
)
_OLDER_NAMES: Final = replace(_NAMES, response_format="output_format")
_MODES: Final[dict[str, ToolMode]] = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}


async def messages_intent(request: CountTokensRequest) -> ChatIntent:
    """Raises InvalidRequestError."""
    messages, dropped = [], list[Ignored]()
    if request.system:
        messages.append(schema.Message(role="system", content=_text(request.system)))
    async for index, message in sliced(enumerate(request.messages)):
        message.check(f"messages[{index}]")
        messages += _messages(message, f"messages[{index}]")
        for at, block in enumerate(message.content if isinstance(message.content, list) else ()):
            if block.is_server_run:
                dropped.append(Ignored(block.type, f"messages[{index}].content[{at}].type"))
    choice = request.tool_choice
    tool_set = request.tool_set()
    use = ToolUse("auto" if tool_set.tools else "none")
    if choice is not None and (request.tools or choice.type in ("any", "tool")):
        use = ToolUse(_MODES[choice.type], [ToolName(choice.name or "")] if choice.type == "tool" else None)
    mode, tools, named = tool_set.chosen(use)
    conversation = Conversation(
        messages=messages,
        tools=tools,
        is_continued=request.messages[-1].role == "assistant",
        template_kwargs=request.chat_template_kwargs or {},
        wishes=_wishes(request),
        names=_NAMES if request.output_format is None else _OLDER_NAMES,
    )
    return ChatIntent(
        conversation=conversation,
        fields=request,
        stops=tuple(request.stop_sequences or ()),
        max_tokens=(request.max_tokens or 1) if isinstance(request, MessagesRequest) else None,
        clamps_max_tokens=True,
        tool_mode=mode,
        named_tool=named,
        tool_set=tool_set,
        dropped_items=tuple(dropped),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        response_format=_format(request),
    )


def _messages(message: InputMessage, field: str) -> Iterable[schema.Message]:
    """Yield the chat messages for one of Anthropic's, in the order of its blocks."""
    if isinstance(message.content, str):
        yield schema.Message(role=message.role, content=message.content)
        return
    if message.role == "assistant":
        calls = [_call(block, field) for block in message.content if block.type == "tool_use"]
        thoughts = thought_text([block.thinking for block in message.content if block.type == "thinking"])
        content = _text(message.content)
        yield schema.Message(role="assistant", content=content, tool_calls=calls or None, reasoning_content=thoughts)
        return
    texts: list[ContentBlock] = []
    for block in message.content:
        if block.type == "text" or block.type in NOT_TEXT:
            texts.append(block)
            continue
        if texts:
            yield schema.Message(role=message.role, content=_text(texts))
            texts = []
        yield schema.Message(role="tool", tool_call_id=block.tool_use_id, content=_result(block))
    if texts:
        yield schema.Message(role=message.role, content=_text(texts))


def _text(content: str | Sequence[ContentBlock]) -> str | list[schema.TextPart]:
    if isinstance(content, str):
        return content
    return [_part(block) for block in content if block.type in ("text", "tool_reference") or block.type in NOT_TEXT]


def _part(block: ContentBlock) -> schema.TextPart:
    if block.type not in NOT_TEXT:
        return schema.TextPart(type="text", text=block.text if block.type == "text" else f"Loaded: {block.tool_name}")
    inner = [{"text": part.text} for part in block.content] if isinstance(block.content, list) else block.content
    return schema.text_part(block, inner)


def _result(block: ContentBlock) -> str | list[schema.TextPart]:
    """Return a tool's result. Chat templates cannot express `is_error`, so it is prefixed to the text."""
    assert not isinstance(block.content, dict), "checked with the message"
    content = _text(block.content or "")
    if not block.is_error:
        return content
    return f"Error: {content}" if isinstance(content, str) else [schema.TextPart(type="text", text="Error:"), *content]


def _call(block: ContentBlock, field: str) -> schema.ToolCall:
    assert block.id is not None, "checked with the message"
    assert block.name is not None, "checked with the message"
    try:
        arguments = bytes(block.input).decode()
        if NOT_JSON in arguments:
            match decode_text(arguments, field):
                case {**fields} if fields.keys() == {NOT_JSON} and isinstance(fields[NOT_JSON], str):
                    arguments = fields[NOT_JSON]  # as the model has written them
    except ValueError:
        raise invalid(field, "holds a tool_use whose input is not valid JSON in UTF-8") from None
    return schema.ToolCall(id=block.id, function=schema.FunctionCall(name=block.name, arguments=arguments))


def _format(request: CountTokensRequest) -> schema.ResponseFormat | None:
    formatted = request.output_format or (None if request.output_config is None else request.output_config.format)
    return None if formatted is None else schema.ResponseFormat(type="json_schema", schema=formatted.schema)


def _wishes(request: CountTokensRequest) -> Wishes:
    thinking, wishes = request.thinking, Wishes(request.chat_template_kwargs)
    if thinking is not None:
        wishes.add({"type": thinking.type, "budget_tokens": thinking.budget_tokens}, "thinking")
    if request.output_config is not None and request.output_config.effort is not None:
        wishes.add(request.output_config.effort, "output_config.effort")
    return wishes


class MessagesFormatter(ItemFormatter):
    """The message object, or its stream of events. The items are content blocks."""

    ping = sse(encode_json({"type": "ping"}), "ping")

    def __init__(self, request: MessagesRequest, spec: GenerationSpec, rules: OutputRules) -> None:
        super().__init__(spec, rules, streams=bool(request.stream))
        self._model = request.model
        self._shows_thoughts = request.thinking is None or request.thinking.display != "omitted"
        self.shows_output = request.max_tokens != 0
        self._has_begun = False
        self._last: ChoiceDelta | None = None

    def last_events(self, response: ResponseStream) -> bytes:
        self._emit("message_delta", delta=self._stop(), usage=self._usage(response))
        self._emit("message_stop")
        return self._take_events()

    def error_event(self, error: ApiError) -> bytes:
        return sse(anthropic_error(error, CURRENT.get().request_id)[1], "error")

    def _start(self, response: ResponseStream) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._emit("message_start", message=self._answer(response))
            self._events.append(self.ping)

    def _add(self, delta: ChoiceDelta) -> None:
        is_last = delta.finish_reason is not None
        self._call_ids += delta.call_ids
        if self.shows_output:
            for kind, text in self._parser.feed(delta.text, last=is_last, parts=delta.parts):
                self._show(kind, text)
        if is_last:
            self._last = delta
            is_cut = delta.finish_reason == "length" or isinstance(delta.stop_reason, str)
            if is_cut and self._is_open and self._items[-1]["type"] == "tool_use" and not self._texts:
                # Without a word of the missing arguments, the call would look whole.
                self._add_text("input_json_delta", partial_json=encode_json(_input("")).decode())
            self._close()

    def _show(self, kind: str, text: str) -> None:
        match kind:
            case "content":
                self._open("text", text="")
                self._add_text("text_delta", text=text)
            case "reasoning":
                self._open("thinking", thinking="", signature="")
                if self._shows_thoughts:
                    self._add_text("thinking_delta", thinking=text)
            case "call":
                self._close()
                self._open("tool_use", id=call_id(self._call_ids), name=text, input={})
            case "arguments":
                self._add_text("input_json_delta", partial_json=text)

    def _open(self, kind: str, **fields: Any) -> None:
        """Open a block of this type, unless one is open."""
        if not (self._is_open and self._items[-1]["type"] == kind):
            self._close()
            self._is_open = True
            self._items.append({"type": kind, **fields})
            self._emit("content_block_start", index=len(self._items) - 1, content_block=self._items[-1])

    def _add_text(self, kind: str, **text: str) -> None:
        """Add the one field of `text` to the text of the open block. A stream keeps no text of what it has sent."""
        if not (self._streams and self._texts):
            self._texts += text.values()
        self._emit("content_block_delta", index=len(self._items) - 1, delta={"type": kind, **text})

    def _close(self) -> None:
        """End the open block, if any."""
        if not self._is_open:
            return
        block = self._items[-1]
        if block["type"] == "thinking":
            self._add_text("signature_delta", signature="")
        text, self._texts, self._is_open = "".join(self._texts), [], False
        if not self._streams:
            if block["type"] != "tool_use":
                block[block["type"]] = text
            elif text:
                block["input"] = _input(text)
        self._emit("content_block_stop", index=len(self._items) - 1)

    def _answer(self, response: ResponseStream) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._items,
            **self._stop(),
            "usage": {**self._usage(response), "service_tier": "standard"},
        }

    def _usage(self, response: ResponseStream) -> dict[str, Any]:
        """Count tokens; input tokens do not include cached ones."""
        usage: dict[str, Any] = response.usage()
        cached, num_output = usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]
        num_thought = usage["completion_tokens_details"]["reasoning_tokens"]
        if not self.shows_output or self._last is None:  # the first event has none: clients add those of the last
            num_output = num_thought = 0
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": num_output,
            "output_tokens_details": {"thinking_tokens": num_thought},
        }

    def _stop(self) -> dict[str, Any]:
        """Return why the answer ended; null before its end."""
        if self._last is None:
            return {"stop_reason": None, "stop_sequence": None}
        if not self.shows_output or self._last.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(self._last.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": self._last.stop_reason}
        has_calls = any(block["type"] == "tool_use" for block in self._items)
        return {"stop_reason": "tool_use" if has_calls else "end_turn", "stop_sequence": None}


def _input(arguments: str) -> Any:
    """Parse a call's arguments. Text that is not an object, such as that of a cut call, is put under a key."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {NOT_JSON: arguments}


class MessagesEndpoint(ConversationEndpoint):
    route, prefix, formatter = "messages", "msg_", MessagesFormatter

    async def read(self, body: bytes, limit: Callable[[], TextLimit], *, counts: bool = False) -> ChatIntent:
        return await messages_intent(await (COUNT_TOKENS if counts else MESSAGES).read(body, limit))
