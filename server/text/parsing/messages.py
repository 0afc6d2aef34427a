"""Pieces in the shapes of chat messages: whole ones, and deltas of a stream."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable
from typing import Any, Final

from server.text.parsing.output import OutputParser, OutputRules
from server.text.parsing.pieces import CallArguments, CallStart, Content, Piece, Reasoning

_ID_ALPHABET: Final = string.ascii_letters + string.digits
_ID_CHARS: Final = 9
"""Mistral's templates insist on nine letters or digits; nobody else minds."""


def call_id() -> str:
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_CHARS))


class ChoiceMessage:
    """One choice's message, read as it arrives."""

    def __init__(self, rules: OutputRules) -> None:
        self._parser = OutputParser(rules)
        self._num_calls = 0

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def deltas(self, text: str, *, last: bool) -> list[dict[str, Any]]:
        """The `delta` objects that the text gives, in order."""
        pieces = self._parser.feed(text)
        if last:
            pieces += self._parser.finish()
        deltas: list[dict[str, Any]] = []
        for piece in _merged(pieces):
            match piece:
                case Content(text):
                    deltas.append({"content": text})
                case Reasoning(text):
                    deltas.append({"reasoning_content": text})
                case CallStart(name):
                    function = {"name": name, "arguments": ""}
                    call = {"index": self._num_calls, "id": call_id(), "type": "function", "function": function}
                    deltas.append({"tool_calls": [call]})
                    self._num_calls += 1
                case CallArguments(text):
                    call = {"index": self._num_calls - 1, "function": {"arguments": text}}
                    deltas.append({"tool_calls": [call]})
        return deltas

    def whole(self, text: str) -> dict[str, Any]:
        """The message of a complete text: its content, reasoning and calls."""
        content = reasoning = ""
        calls: list[dict[str, Any]] = []
        for delta in self.deltas(text, last=True):
            content += delta.get("content", "")
            reasoning += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    del call["index"]
                    calls.append(call)
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        if reasoning:
            message["reasoning_content"] = reasoning
        return message


def _merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours of one kind as one."""
    merged: list[Piece] = []
    for piece in pieces:
        previous = merged[-1] if merged else None
        if previous is not None and type(previous) is type(piece) and not isinstance(piece, CallStart):
            assert not isinstance(previous, CallStart)
            merged[-1] = type(piece)(previous.text + piece.text)
        else:
            merged.append(piece)
    return merged
