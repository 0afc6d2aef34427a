"""/v1/responses, stateless: nothing is stored, so a request carries its whole conversation.

A body becomes a chat request, and both routes share one path to the worker. The response is a list of output items,
built piece by piece, and each step is an event:

    output_item.added, [content_part.added], deltas ..., done events from the inside out
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from server.api.chat import chat_spec
from server.api.endpoint import GenerateEndpoint, PreparedRequest
from server.api.formatting import ResponseFormatter, chat_logprobs, encode_json
from server.auth.identity import Identity
from server.errors import ApiError, InvalidRequestError
from server.request.choice import ChoiceDelta, TokenEntry
from server.request.response import ResponseStream
from server.request_context import stage
from server.schema.decoding import unsupported
from server.schema.fields import (
    AllowedTool,
    AllowedTools,
    FunctionCall,
    FunctionDefinition,
    JsonSchemaFormat,
    Message,
    ModelFields,
    NamedFunction,
    ResponseFormat,
    Tool,
    ToolCall,
    ToolChoice,
)
from server.schema.requests import (
    RESPONSES,
    ChatRequest,
    FunctionTool,
    InputItem,
    ResponsesRequest,
    ResponsesToolChoice,
    TextOptions,
)
from server.text.detokenizer import TokenBytes
from server.text.parsing.messages import OutputParser, OutputRules, call_id
from server.text.parsing.reader import CallArguments, CallStart, Content, OutputDelta, Reasoning

FIELD_NAMES: Final = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""The chat's names of fields that this route calls otherwise."""

Event = tuple[str, dict[str, Any]]
"""Type and fields."""


class ResponsesEndpoint(GenerateEndpoint):
    route = "responses"

    async def prepare(self, body: bytes, identity: Identity) -> PreparedRequest:
        with stage("validate"):
            request = await RESPONSES.read(body, self._models.max_text_bytes, "input")
            chat = _chat_request(request)
            with _field_names():
                chat.check()
        id_ = f"resp_{uuid.uuid4().hex}"
        model = self._model(chat.model, identity)
        with stage("tokenise"), _field_names():
            spec, rules = await chat_spec(chat, model, identity, id_, FIELD_NAMES)
        formatter = ResponsesFormatter(id_, request, rules, model.tokenizer.token_bytes)
        return PreparedRequest((spec,), formatter, bool(request.stream))


@contextmanager
def _field_names() -> Iterator[None]:
    """Let errors of the chat request name the fields of this route."""
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
        **{field: getattr(request, field) for field in ModelFields.__struct_fields__},
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


def _tool_choice(choice: str | ResponsesToolChoice | None) -> str | ToolChoice | None:
    if not isinstance(choice, ResponsesToolChoice):
        return choice
    if choice.type == "function" and choice.name:
        return ToolChoice(type="function", function=NamedFunction(name=choice.name))
    if choice.type != "allowed_tools" or not choice.tools:
        raise unsupported("tool_choice.type", "can only be function or allowed_tools")
    named = [AllowedTool(type=tool.type, function=NamedFunction(name=tool.name or "")) for tool in choice.tools]
    return ToolChoice(type="allowed_tools", allowed_tools=AllowedTools(mode=choice.mode or "auto", tools=named))


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


class OutputItems:
    """One response's items. At most one is open: the last."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open = False
        self._logprobs: list[dict[str, Any]] = []
        """Of tokens whose text is not released yet."""

    def add(self, pieces: Iterable[OutputDelta], logprobs: Iterable[dict[str, Any]] = ()) -> list[Event]:
        """`logprobs` of the pieces' tokens, which go out with the first text of the answer."""
        events: list[Event] = []
        self._logprobs += logprobs
        for piece in pieces:
            match piece:
                case Content(text):
                    self._ensure("message", events)
                    part, fresh = self._part(), self._logprobs
                    self._logprobs = []
                    part["text"] += text
                    part["logprobs"] += fresh
                    events.append(("response.output_text.delta", {**self._place(), "delta": text, "logprobs": fresh}))
                case Reasoning(text):
                    self._ensure("reasoning", events)
                    self._part()["text"] += text
                    events.append(("response.reasoning_text.delta", {**self._place(), "delta": text}))
                case CallStart(name):
                    self._logprobs = []
                    self.close("completed", events)
                    self._begin("function_call", events, name=name, call_id=call_id(), arguments="")
                case CallArguments(text):
                    self.items[-1]["arguments"] += text
                    place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
                    events.append(("response.function_call_arguments.delta", {**place, "delta": text}))
        return events

    def close(self, status: str, events: list[Event]) -> None:
        """The open item is done."""
        if not self._open:
            return
        self._open = False
        item = self.items[-1]
        item["status"] = status
        index = len(self.items) - 1
        if item["type"] == "function_call":
            done = {"item_id": item["id"], "output_index": index, "name": item["name"], "arguments": item["arguments"]}
            events.append(("response.function_call_arguments.done", done))
        else:
            part = self._part()
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            extra: dict[str, Any] = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            events.append((f"response.{kind}.done", {**self._place(), "text": part["text"], **extra}))
            events.append(("response.content_part.done", {**self._place(), "part": dict(part)}))
        events.append(("response.output_item.done", {"output_index": index, "item": item}))

    def _ensure(self, kind: str, events: list[Event]) -> None:
        if self._open and self.items[-1]["type"] == kind:
            return
        self.close("completed", events)
        if kind == "message":
            self._begin(kind, events, role="assistant", content=[])
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            self._begin(kind, events, summary=[], content=[])
            part = {"type": "reasoning_text", "text": ""}
        self.items[-1]["content"].append(part)
        events.append(("response.content_part.added", {**self._place(), "part": {**part}}))

    def _begin(self, kind: str, events: list[Event], **fields: Any) -> None:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        self.items.append(item)
        self._open = True
        added = {**item, "content": []} if "content" in item else dict(item)
        events.append(("response.output_item.added", {"output_index": len(self.items) - 1, "item": added}))

    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = self.items[-1]["content"][0]
        return part

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, "content_index": 0}


class ResponsesFormatter(ResponseFormatter):
    def __init__(self, id_: str, request: ResponsesRequest, rules: OutputRules, pieces: TokenBytes) -> None:
        self._id = id_
        self._pieces = pieces
        self._num_top = request.num_top_logprobs
        self._request = request
        self._parser = OutputParser(rules)
        self._items = OutputItems()
        self._created = int(time.time())
        self._sequence = 0
        self._begun = False
        self._incomplete = False

    def body(self, response: ResponseStream, choices: Sequence[ChoiceDelta]) -> Iterator[bytes]:
        (choice,) = choices
        pieces = self._parser.feed(choice.text) + self._parser.finish()
        self._items.add(pieces, self._logprobs(choice.entries))
        self._finish(choice.finish_reason)
        yield encode_json(self._response(self._status, response))

    def events(self, response: ResponseStream, batch: Sequence[ChoiceDelta]) -> bytes:
        events: list[Event] = []
        if not self._begun:
            self._begun = True
            for kind in ("response.created", "response.in_progress"):
                events.append((kind, {"response": self._response("in_progress", None)}))
        for delta in batch:
            pieces = self._parser.feed(delta.text)
            if delta.finish_reason is not None:
                pieces += self._parser.finish()
            events += self._items.add(pieces, self._logprobs(delta.entries))
            if delta.finish_reason is not None:
                events += self._finish(delta.finish_reason)
        return b"".join([self._event(*event) for event in events])

    def last_events(self, response: ResponseStream) -> bytes:
        return self._event(f"response.{self._status}", {"response": self._response(self._status, response)})

    def error_event(self, error: ApiError) -> bytes:
        return self._event("error", {"code": error.code, "message": error.message, "param": error.param})

    def _logprobs(self, entries: Sequence[TokenEntry]) -> list[dict[str, Any]]:
        """Of the answer's tokens, not of the thoughts before it."""
        if self._num_top is None:
            return []
        shown = [entry for entry in entries if entry.start >= self._parser.answer_start]
        return list(chat_logprobs(self._pieces, shown, self._num_top))

    @property
    def _status(self) -> str:
        return "incomplete" if self._incomplete else "completed"

    def _finish(self, reason: str | None) -> list[Event]:
        self._incomplete = reason == "length"
        events: list[Event] = []
        self._items.close(self._status, events)
        return events

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        payload = encode_json({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), payload)

    def _response(self, status: str, response: ResponseStream | None) -> dict[str, Any]:
        """With an answer the whole; without one the object of a response that has just begun."""
        request = self._request
        text_format = request.text.format if request.text is not None else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": request.model,
            "output": self._items.items if response is not None else [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": _written(text_format) if text_format is not None else {"type": "text"}},
            "tool_choice": _written(request.tool_choice) or "auto",
            "tools": [{"parameters": None, "strict": None, **_written(tool)} for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": _usage(response) if response is not None else None,
            "user": request.user,
            "metadata": request.metadata or {},
        }


def _written(value: Any) -> Any:
    """A struct as its fields that are given."""
    fields = msgspec.to_builtins(value)
    return {key: item for key, item in fields.items() if item is not None} if isinstance(fields, dict) else fields


def _usage(response: ResponseStream) -> dict[str, Any]:
    usage: dict[str, Any] = response.usage()
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }
