"""The parser of one choice's whole text: reasoning first, then content and calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from server.text.parsing.formats import (
    MARKERS,
    ForcedParser,
    HermesParser,
    ListParser,
    Llama3Parser,
    MistralParser,
    ToolFormat,
)
from server.text.parsing.pieces import CallArguments, CallStart, Content, Piece, Reasoning, TextParser, ambiguous_len

THINK: Final = "<think>"
END_THINK: Final = "</think>"

ReasoningStart = Literal["none", "maybe", "inside"]


@dataclass(frozen=True, slots=True)
class OutputRules:
    """How one request's text is to be read. With neither reasoning nor tools it is content, unparsed."""

    reasoning: ReasoningStart = "none"
    """`maybe`: the text may begin with <think>. `inside`: the prompt's end has opened it already."""
    tools: ToolFormat | Literal["list"] | None = None
    forced: str | None = None
    """The one function that tool_choice names."""
    tool_names: frozenset[str] = frozenset()
    parallel: bool = True

    @property
    def plain(self) -> bool:
        return self.reasoning == "none" and self.tools is None and self.forced is None

    def markers(self) -> tuple[str, ...]:
        """Special tokens that must show in the text for it to be read."""
        found: tuple[str, ...] = () if self.reasoning == "none" else (THINK, END_THINK)
        if self.tools is not None and self.tools != "list":
            found += MARKERS[self.tools]
        return found


class OutputParser:
    """Feed a choice's text as it is released; the pieces in a row do not depend on how it was cut."""

    def __init__(self, rules: OutputRules) -> None:
        self._inner = _inner(rules)
        self._state: Literal["maybe", "inside", "trim", "after"] = (
            "after" if rules.reasoning == "none" else rules.reasoning
        )
        self._held = ""
        self._num_fed = 0
        self.answer_start = 0
        """Characters of the text that belong to thoughts, as far as is known."""
        self._num_calls = 0
        self._parallel = rules.parallel

    def feed(self, text: str) -> list[Piece]:
        if self._state == "after":
            return self._allowed(self._after(text))
        pieces: list[Piece] = []
        self._num_fed += len(text)
        text, self._held = self._held + text, ""
        if self._state == "maybe":
            text = self._maybe(text)
        if self._state == "inside":
            text = self._inside(text, pieces)
        if self._state == "trim":
            text = text.lstrip()
            if text:
                self._state = "after"
        if self._state == "after" and text:
            pieces += self._after(text)
        return self._allowed(pieces)

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._held and self._state == "inside":
            pieces.append(Reasoning(self._held))
        elif self._held:
            pieces += self._after(self._held)
        if self._inner is not None:
            pieces += self._inner.finish()
        return self._allowed(pieces)

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

    def _inside(self, text: str, pieces: list[Piece]) -> str:
        thought, end, rest = text.partition(END_THINK)
        if not end:
            self.answer_start = self._num_fed
            keep = ambiguous_len(thought, (END_THINK,))
            thought, self._held = thought[: len(thought) - keep], thought[len(thought) - keep :]
        else:
            self._state = "trim"
            self.answer_start = self._num_fed - len(rest)
        if thought:
            pieces.append(Reasoning(thought))
        return rest

    def _after(self, text: str) -> list[Piece]:
        if self._inner is not None:
            return self._inner.feed(text)
        return [Content(text)] if text else []

    def _allowed(self, pieces: list[Piece]) -> list[Piece]:
        """With parallel_tool_calls false, the first call alone."""
        allowed = []
        for piece in pieces:
            if isinstance(piece, CallStart):
                self._num_calls += 1
            if self._parallel or self._num_calls <= 1 or not isinstance(piece, CallStart | CallArguments):
                allowed.append(piece)
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
