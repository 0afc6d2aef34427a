"""/v1/responses, stateless: nothing is stored, so a request carries its whole conversation.

A body becomes the intent of a chat, and both routes share one path to the worker. The response is a list of output
items, built piece by piece, and each step is an event:

    output_item.added, [content_part.added], deltas ..., done events from the inside out
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Final

from starlette.requests import Request
from starlette.responses import Response

from server.api.chat import ConversationEndpoint
from server.api.formatting import ItemFormatter, chat_logprobs
from server.api.prompts.items import responses_intent
from server.errors import ApiError, responses_error
from server.request.choice import ChoiceDelta, GenerationSpec, TokenEntry
from server.request.response import ResponseStream
from server.schema.decoding import TextLimit, unsupported
from server.schema.intent import ChatIntent
from server.schema.requests import RESPONSES, ResponsesRequest
from server.text.output_parser import OutputDelta, OutputRules, call_id

_ID_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_ITEM_TYPES: Final = {"function": "function_call", "custom": "custom_tool_call"}
_CALL_EVENTS: Final = {"function_call": "function_call_arguments", "custom_tool_call": "custom_tool_call_input"}


class ResponsesFormatter(ItemFormatter):
    """The response object, or its stream of numbered events."""

    def __init__(self, request: ResponsesRequest, spec: GenerationSpec, rules: OutputRules) -> None:
        super().__init__(spec, rules, streams=bool(request.stream))
        self._sampling = spec.sampling
        self._token_bytes = spec.model.tokenizer.token_bytes
        self._request = request
        self._created = int(time.time())
        self._status = "in_progress"
        self._logprobs: list[dict[str, Any]] = []
        """Log probabilities of tokens whose text is not released yet."""
        self._num_events = 0

    def last_events(self, response: ResponseStream) -> bytes:
        self._emit(f"response.{self._status}", response=self._answer(response))
        return self._take_events()

    def error_event(self, error: ApiError) -> bytes:
        """SDKs and Codex wait for `response.failed`."""
        self._start()
        error = responses_error(error)
        failure = {"code": error.code or error.type, "message": error.message}
        self._emit("error", param=error.param, **failure)
        self._emit("response.failed", response=self._answer() | {"status": "failed", "error": failure})
        return self._take_events()

    def _start(self, response: ResponseStream | None = None) -> None:
        if not self._num_events:
            for kind in ("created", "in_progress"):
                self._emit(f"response.{kind}", response=self._answer())

    def _emit(self, name: str, /, **fields: Any) -> None:
        super()._emit(name, sequence_number=self._num_events, **fields)
        self._num_events += 1

    def _emit_in_item(self, kind: str, **fields: Any) -> None:
        """Emit an event inside the last item."""
        index = len(self._items) - 1
        self._emit(f"response.{kind}", item_id=self._items[-1]["id"], output_index=index, **fields)

    def _add(self, delta: ChoiceDelta) -> None:
        """Add text token by token where there are log probabilities: items must not depend on how deltas are cut."""
        is_last, begin = delta.finish_reason is not None, self._parser.num_chars
        self._logprobs += delta.logprobs
        self._call_ids += delta.call_ids
        if delta.parts:
            self._show(self._parser.feed("", last=False, parts=delta.parts))
        if is_last or delta.text or delta.entries:
            bounds = [0, *(entry.start - begin for entry in delta.entries[1:]), len(delta.text)]
            for at, (start, end) in enumerate(pairwise(bounds), 1):
                is_end = is_last and at == len(bounds) - 1
                self._add_piece(delta.text[start:end], delta.entries[at - 1 : at], is_last=is_end)
        if is_last:
            self._status = "incomplete" if delta.finish_reason == "length" else "completed"
            self._close("incomplete" if self._parser.is_cut_at(delta.stop_reason) else self._status)

    def _add_piece(self, piece: str, entries: Sequence[TokenEntry], *, is_last: bool) -> None:
        parsed = self._parser.feed(piece, last=is_last)
        shown = [entry for entry in entries if entry.start >= self._parser.answer_start]  # not of the reasoning
        self._logprobs += chat_logprobs(self._token_bytes, shown, self._request.num_top_logprobs or 0)
        self._show(parsed)
        is_call = self._items and self._items[-1]["type"] in _CALL_EVENTS
        if self._parser.thinking or (is_call and piece.strip()):  # space behind a call may begin a text
            self._logprobs = []

    def _show(self, parsed: Iterable[OutputDelta]) -> None:
        for kind, text in parsed:
            match kind:
                case "content":
                    self._open_part("message")
                    logprobs, self._logprobs = self._logprobs, []
                    self._items[-1]["content"][0]["logprobs"] += logprobs
                    self._emit_in_item("output_text.delta", content_index=0, delta=text, logprobs=logprobs)
                case "reasoning":
                    self._open_part("reasoning")
                    self._emit_in_item("reasoning_text.delta", content_index=0, delta=text)
                case "call":
                    self._logprobs = []  # those of the call's markup: a call has no field for them
                    self._close("completed")
                    name = self._rules.client_name(text)
                    space = {} if name.namespace is None else {"namespace": name.namespace}
                    key = "input" if name.kind == "custom" else "arguments"
                    self._begin(
                        _ITEM_TYPES[name.kind], name=name.name, call_id=call_id(self._call_ids), **{key: ""}, **space
                    )
                case "arguments" | "input":
                    self._emit_in_item(f"{_CALL_EVENTS[self._items[-1]['type']]}.delta", delta=text)
            if kind != "call":
                self._texts.append(text)

    def _close(self, status: str) -> None:
        """End the open item."""
        if not self._is_open:
            return
        item, text, self._texts = self._items[-1], "".join(self._texts), []
        self._is_open, item["status"] = False, status
        if (event := _CALL_EVENTS.get(item["type"])) is not None:
            done = {"input": text} if "input" in item else {"name": item["name"], "arguments": text}
            item |= done
            self._emit_in_item(f"{event}.done", **done)
        else:
            part = item["content"][0]
            part["text"] = text
            if item["type"] == "message":  # the last tokens may have no text
                part["logprobs"] += self._logprobs
            done = {key: part[key] for key in ("text", "logprobs") if key in part}
            self._emit_in_item(f"{part['type']}.done", content_index=0, **done)
            self._emit_in_item("content_part.done", content_index=0, part=part)
        self._emit("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _open_part(self, kind: str) -> None:
        """Open an item of this kind, with its content part, unless one is open."""
        if not (self._is_open and self._items[-1]["type"] == kind):
            self._close("completed")
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            if kind == "message":
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            own: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            self._begin(kind, **own, content=[])
            self._items[-1]["content"].append(part)
            self._emit_in_item("content_part.added", content_index=0, part=part)

    def _begin(self, kind: str, **fields: Any) -> None:
        item = {"id": f"{_ID_PREFIXES[kind]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        self._items.append(item)
        self._is_open = True
        self._emit("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _answer(self, response: ResponseStream | None = None) -> dict[str, Any]:
        """Return the response object; without output and usage unless its stream is given."""
        request = self._request
        text_format = request.text.format if request.text is not None else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": request.model,
            "output": self._items if response is not None else [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": self._sampling.temperature if request.temperature is None else request.temperature,
            "text": {"format": text_format or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": [_echoed(tool) for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": self._sampling.top_p if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": _usage(response) if response is not None else None,
            "user": request.user,
            "metadata": request.metadata or {},
        }


def _echoed(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the client's tool. A function gets null for missing fields, which the SDK requires."""
    return {"parameters": None, "strict": None, **tool} if tool.get("type") == "function" else tool


def _usage(response: ResponseStream) -> dict[str, Any]:
    usage: dict[str, Any] = response.usage()
    details = {key: n for key, n in usage["prompt_tokens_details"].items() if key != "audio_tokens"}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**details, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }


class ResponsesEndpoint(ConversationEndpoint):
    route, prefix, formatter = "responses", "resp_", ResponsesFormatter
    counted: ClassVar = {"object": "response.input_tokens"}

    async def read(self, body: bytes, limit: Callable[[], TextLimit], *, counts: bool = False) -> ChatIntent:
        return responses_intent(await RESPONSES.read(body, limit))

    async def compact(self, http_request: Request) -> Response:
        """Raises InvalidRequestError: no conversation is stored, so none can be compacted."""
        raise unsupported("compaction", "is not offered: send a summary of the older items, as a message")
