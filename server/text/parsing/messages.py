"""Parse one choice's text into reasoning, content and tool calls, and write these as OpenAI's messages and deltas."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

from server.text.parsing.formats import (
    MARKERS,
    ForcedParser,
    HermesParser,
    ListParser,
    Llama3Parser,
    MistralParser,
    ToolFormat,
)
from server.text.parsing.reader import (
    CallArguments,
    CallStart,
    Content,
    OutputDelta,
    Reasoning,
    TextParser,
    ambiguous_len,
)

THINK: Final = "<think>"
END_THINK: Final = "</think>"
_ID_ALPHABET: Final = string.ascii_letters + string.digits
_ID_CHARS: Final = 9
"""Mistral's templates insist on nine letters or digits."""

ReasoningStart = Literal["none", "maybe", "inside"]


@dataclass(frozen=True, slots=True)
class OutputRules:
    """How to parse one request's text. With neither reasoning nor tools all of it is content."""

    reasoning: ReasoningStart = "none"
    """`maybe`: the text may begin with <think>. `inside`: the prompt ends with <think>."""
    tools: ToolFormat | Literal["list"] | None = None
    forced: str | None = None
    """The one function that tool_choice names."""
    tool_names: frozenset[str] = frozenset()
    parallel: bool = True

    @property
    def plain(self) -> bool:
        return self.reasoning == "none" and self.tools is None and self.forced is None

    def markers(self) -> tuple[str, ...]:
        """Return the special tokens that the detokenizer must show to this parser."""
        found: tuple[str, ...] = () if self.reasoning == "none" else (THINK, END_THINK)
        if self.tools is not None and self.tools != "list":
            found += MARKERS[self.tools]
        return found


class OutputParser:
    """Parse one choice's text: reasoning first, then content and calls. How the text is cut does not matter."""

    def __init__(self, rules: OutputRules) -> None:
        self._inner = _inner(rules)
        self._state: Literal["maybe", "inside", "trim", "after"] = (
            "after" if rules.reasoning == "none" else rules.reasoning
        )
        self._held = ""
        self._num_fed = 0
        self.answer_start = 0
        """Number of characters known to belong to reasoning."""
        self._num_calls = 0
        self._parallel = rules.parallel

    def feed(self, text: str) -> list[OutputDelta]:
        if self._state == "after":
            return self._allowed(self._after(text))
        deltas: list[OutputDelta] = []
        self._num_fed += len(text)
        text, self._held = self._held + text, ""
        if self._state == "maybe":
            text = self._maybe(text)
        if self._state == "inside":
            text = self._inside(text, deltas)
        if self._state == "trim":
            text = text.lstrip()
            if text:
                self._state = "after"
        if self._state == "after" and text:
            deltas += self._after(text)
        return self._allowed(deltas)

    def finish(self) -> list[OutputDelta]:
        deltas: list[OutputDelta] = []
        if self._held and self._state == "inside":
            deltas.append(Reasoning(self._held))
        elif self._held:
            deltas += self._after(self._held)
        if self._inner is not None:
            deltas += self._inner.finish()
        return self._allowed(deltas)

    def _maybe(self, text: str) -> str:
        begun = text.lstrip()
        if len(begun) < len(THINK) and THINK.startswith(begun):
            self._held = text
            return ""
        if begun.startswith(THINK):
            self._state = "inside"
            return begun.removeprefix(THINK)
        self._state = "after"
        return text

    def _inside(self, text: str, deltas: list[OutputDelta]) -> str:
        thought, end, rest = text.partition(END_THINK)
        if not end:
            self.answer_start = self._num_fed
            keep = ambiguous_len(thought, (END_THINK,))
            thought, self._held = thought[: len(thought) - keep], thought[len(thought) - keep :]
        else:
            self._state = "trim"
            self.answer_start = self._num_fed - len(rest)
        if thought:
            deltas.append(Reasoning(thought))
        return rest

    def _after(self, text: str) -> list[OutputDelta]:
        if self._inner is not None:
            return self._inner.feed(text)
        return [Content(text)] if text else []

    def _allowed(self, deltas: list[OutputDelta]) -> list[OutputDelta]:
        """Keep only the first call when parallel_tool_calls is false."""
        if self._parallel:
            return deltas
        allowed = []
        for delta in deltas:
            if isinstance(delta, CallStart):
                self._num_calls += 1
            if self._num_calls <= 1 or not isinstance(delta, CallStart | CallArguments):
                allowed.append(delta)
        return allowed


def _inner(rules: OutputRules) -> TextParser | None:
    if rules.forced is not None:
        return ForcedParser(rules.forced)
    match rules.tools:
        case "hermes":
            return HermesParser()
        case "llama3":
            return Llama3Parser(rules.tool_names)
        case "mistral":
            return MistralParser()
        case "list":
            return ListParser()
    return None


def call_id() -> str:
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_CHARS))


class ChoiceMessage:
    """Write one choice's text as OpenAI's message, as it arrives or whole."""

    def __init__(self, rules: OutputRules) -> None:
        self._parser = OutputParser(rules)
        self._num_calls = 0

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def deltas(self, text: str, *, last: bool) -> list[dict[str, Any]]:
        """Return the `delta` objects of a stream for more text."""
        parsed = self._parser.feed(text)
        if last:
            parsed += self._parser.finish()
        deltas: list[dict[str, Any]] = []
        for delta in _merged(parsed):
            match delta:
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
        """Return the message of a complete text, with its content, reasoning and calls."""
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


def _merged(deltas: Iterable[OutputDelta]) -> list[OutputDelta]:
    """Join neighbours of one kind."""
    merged: list[OutputDelta] = []
    for delta in deltas:
        previous = merged[-1] if merged else None
        if previous is not None and type(previous) is type(delta) and not isinstance(delta, CallStart):
            assert not isinstance(previous, CallStart)
            merged[-1] = type(delta)(previous.text + delta.text)
        else:
            merged.append(delta)
    return merged
