"""The response object and its stream of typed, numbered events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from server.api.job import encode_json
from server.api.logprobs import chat_logprobs
from server.api.responses.items import Event, OutputItems
from server.api.responses.types import ResponsesRequest
from server.errors import ApiError
from server.request.answer import Answer, CollectedChoice
from server.request.choice import ChoiceDelta, TokenEntry
from server.text.detokenizer import TokenBytes
from server.text.parsing.messages import OutputParser, OutputRules


class ResponsesPresenter:
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

    def body(self, answer: Answer, choices: Sequence[CollectedChoice]) -> Iterator[bytes]:
        (choice,) = choices
        pieces = self._parser.feed(choice.text) + self._parser.finish()
        self._items.add(pieces, self._logprobs(choice.entries))
        self._finish(choice.finish_reason)
        yield encode_json(self._response(self._status, answer))

    def events(self, answer: Answer, batch: Sequence[ChoiceDelta]) -> bytes:
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

    def last_events(self, answer: Answer) -> bytes:
        return self._event(f"response.{self._status}", {"response": self._response(self._status, answer)})

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

    def _response(self, status: str, answer: Answer | None) -> dict[str, Any]:
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
            "output": self._items.items if answer is not None else [],
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
            "usage": _usage(answer) if answer is not None else None,
            "user": request.user,
            "metadata": request.metadata or {},
        }


def _written(value: Any) -> Any:
    """A struct as its fields that are given."""
    fields = msgspec.to_builtins(value)
    return {key: item for key, item in fields.items() if item is not None} if isinstance(fields, dict) else fields


def _usage(answer: Answer) -> dict[str, Any]:
    usage: dict[str, Any] = answer.usage()
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }
