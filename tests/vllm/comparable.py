"""Answers in a form in which those of one engine, asked twice, are equal: without ids and times, and whole in parts.

vLLM puts several tokens into one event when its client reads slowly. So events that continue each other are joined.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, Final

import httpx

IDS: Final = frozenset(
    {"id", "created", "created_at", "completed_at", "item_id", "call_id", "signature", "request_id", "sequence_number"}
)
_GROWING: Final = frozenset(
    {"text", "content", "reasoning", "thinking", "partial_json", "arguments", "delta", "refusal", "input"}
)
"""Texts of which an event has a part."""
_GROWING_LISTS: Final = frozenset(
    {"token_ids", "tokens", "token_logprobs", "top_logprobs", "text_offset", "content", "logprobs"}
)
_LATEST: Final = frozenset({"usage", "finish_reason", "stop_reason", "system_fingerprint"})
_PARTS: Final = ("reasoning", "content", "tool_calls")
"""Fields of a chat's delta that a client reads one after the other."""


class _DifferentError(Exception):
    """Two events do not continue each other."""


def comparable(answer: httpx.Response) -> Any:
    """Return the status and every field of an answer but ids and times, and whether a stream ends with [DONE]."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.status_code, _scrubbed(answer.json())
    lines = [line for line in answer.text.splitlines() if line and not line.startswith(":")]
    parts = [part for line in lines if line.startswith("data: {") for part in _split(_scrubbed(json.loads(line[6:])))]
    tokens = _take_tokens(parts)
    # Choices take turns as they like. The usage comes last, and events of other APIs keep their order.
    ordered = sorted(filter(_says_something, parts), key=_index)
    named = {line.removeprefix("event: ") for line in lines if line.startswith("event: ")}
    return answer.status_code, _joined(ordered), tokens, named, lines[-1] == "data: [DONE]"


def same(ours: Any, theirs: Any) -> bool:
    """Compare all but the last bits of numbers: sums depend on the batch, in which a probe may be."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[name], theirs[name]) for name in ours)
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(same(*pair) for pair in zip(ours, theirs, strict=True))
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-4, abs_tol=1e-5)
    return bool(ours == theirs)


def error_of(answer: httpx.Response) -> tuple[int, str, str | None]:
    """Return status, text and field of an error, whatever its shape."""
    error = answer.json()["error"]
    return answer.status_code, error["message"], error.get("param")


def _scrubbed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _scrubbed(item) for name, item in value.items() if name not in IDS}
    return [_scrubbed(item) for item in value] if isinstance(value, list) else value


def _split(event: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield an event of a chat once for each part of its delta."""
    choices = event.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    calls = delta.get("tool_calls") or []
    parts = [{name: delta[name]} for name in _PARTS[:2] if delta.get(name)] + [{"tool_calls": [call]} for call in calls]
    if len(choices) != 1 or len(parts) < 2:
        yield event
        return
    for number, part in enumerate(parts):
        choice = choices[0] | {"delta": part}
        if number < len(parts) - 1:
            choice.pop("stop_reason", None)  # only the event of the end has it
            choice |= {"finish_reason": None, "token_ids": None, "logprobs": None}
        yield event | {"choices": [choice]}


def _take_tokens(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return ids and log probabilities of each choice. Its events, which share them at chance, get null for them."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event.get("choices", ()):
            here = {name: choice[name] for name in ("token_ids", "logprobs") if choice.get(name)}
            choice |= dict.fromkeys(here)
            before = found.setdefault(choice["index"], {})
            for name, value in here.items():
                before[name] = _grown_value(name, before[name], value) if name in before else value
    return found


def _says_something(event: dict[str, Any]) -> bool:
    return all(choice.get("delta") != {} or choice["finish_reason"] for choice in event.get("choices", ()))


def _index(event: dict[str, Any]) -> int:
    choices = event.get("choices", [{}])
    return int(choices[0].get("index", 0)) if choices else 1 << 20


def _joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = []
    for event in events:
        try:
            if not result or event.get("type", "").endswith(("start", "stop", "done", "added", "created")):
                raise _DifferentError
            result[-1] = _grown(result[-1], event)
        except _DifferentError:
            result.append(event)
    return result


def _grown(before: dict[str, Any], event: dict[str, Any]) -> dict[str, Any]:
    """Return an event with what the next one adds. Raises _DifferentError."""
    if not before.keys() | _LATEST >= event.keys() or before.get("index") != event.get("index"):
        raise _DifferentError
    return before | {name: _grown_value(name, before.get(name), value) for name, value in event.items()}


def _grown_value(name: str, before: Any, value: Any) -> Any:
    if name in _LATEST:
        return before if value is None else value
    if isinstance(before, dict) and isinstance(value, dict):
        return _grown(before, value)
    if isinstance(before, list) and isinstance(value, list):
        if name in _GROWING_LISTS:
            return before + value
        if len(before) == len(value) == 1:
            return [_grown_value("", before[0], value[0])]
    if name in _GROWING and isinstance(before, str) and isinstance(value, str):
        return before + value
    if before != value:
        raise _DifferentError
    return before
