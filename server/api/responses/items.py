"""The output items of a response, built piece by piece, and the events that tell of each step.

output_item.added, [content_part.added], deltas ..., done events from the inside out
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from server.text.parsing.messages import call_id
from server.text.parsing.reader import CallArguments, CallStart, Content, OutputDelta, Reasoning

Event = tuple[str, dict[str, Any]]
"""Type and fields."""


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
