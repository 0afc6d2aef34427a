"""The parts that every tool-call format is made of: read on in arriving text, and pass on what was read.

A format is a generator that reads like the format itself. It yields whenever it needs more text.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from server.text.call_syntax import JSON_STOP, JsonScanner, call_of, cut_name, is_json, match_head, unquoted
from server.text.detokenizer import ambiguous_len
from server.text.tokenizer import Tokenizer
from worker.common.json_schema import compiler_options, pointer

DeltaKind = Literal["content", "reasoning", "call", "arguments", "input"]
Emit = Callable[[str], None]
Reading = Generator[None, None, None]
"""Reads on in the text, and yields for more."""
Checking = Generator[None, None, bool]
"""Reads on, and returns whether something was found."""
Finding = Generator[None, None, str]
"""Reads on, and returns what it found."""


class TextReader(ABC):
    """The text of one choice that has arrived and is not read yet."""

    def __init__(self, tool_names: frozenset[str], schemas: Mapping[str, Any]) -> None:
        self.tool_names = tool_names
        self.schemas = schemas
        """The JSON schemas of the tools' arguments, by name."""
        self.text = ""
        self.num_chars = 0
        self.ended = False
        """True: the text is complete."""
        self.thinking = False
        self.answer_start = 0
        """Number of characters known to belong to reasoning."""

    @abstractmethod
    def emit(self, kind: DeltaKind, text: str) -> None:
        """Pass on text of one kind. Each call begins with its name."""

    @abstractmethod
    def emit_content(self, text: str) -> None:
        """Pass on content. White space at its end waits until more content follows."""

    def call_list(self, before: str = "", otherwise: Emit | None = None, *, is_constrained: bool = False) -> Checking:
        """Read a list of calls, which begins with its bracket. Return whether it holds one.

        See `call`.
        """
        otherwise = otherwise or self.emit_content
        unread, has_call = before + "[", False
        self.text = self.text[1:]
        while True:
            space = yield from self.space(", \t\r\n" if has_call else None)
            if self.text[:1] == "{":
                is_call = yield from self.call(unread + space, otherwise, is_constrained=is_constrained)
                unread, has_call = "", has_call or is_call
                if is_call or is_constrained:
                    continue
            elif self.text[:1] == "]":
                self.text = self.text[1:]
                unread += space + "]" if unread else ""
            if unread and not is_constrained:
                otherwise(unread)
            return has_call

    def call(self, before: str = "", otherwise: Emit | None = None, *, is_constrained: bool = False) -> Checking:
        """Read one call object, which begins with its brace. Return whether it is a call.

        Another object goes to `otherwise`, after the text `before` it: content by default. `is_constrained`: the text
        follows a grammar, so a cut object is never content.
        """
        scanner, size = JsonScanner(), 0
        while True:
            size += scanner.feed(self.text[size:])
            head = match_head(self.text[:size])
            if head != "partial" or scanner.done or self.ended:
                break
            yield
        parts: list[str] = []
        if not isinstance(head, tuple):
            complete = yield from self.value(parts.append)
            return self._emit_object("".join(parts), before, otherwise or self.emit_content, complete, is_constrained)
        self.emit("call", head[0])
        self.text = self.text[head[1] :]
        if self.text[0] in '"n':  # null: a call without arguments
            complete = yield from self.value(parts.append)
            text = "".join(parts)
            closing = "" if complete or text[0] == "n" else '"'
            self.emit("arguments", "{}" if "null".startswith(text) else unquoted(text + closing))
        else:
            yield from self.value(partial(self.emit, "arguments"))
        yield from self._tail()
        return True

    def _emit_object(self, text: str, before: str, otherwise: Emit, complete: bool, is_constrained: bool) -> bool:
        """Pass on an object whose head is not that of a call. Return whether it is a call all the same."""
        if (call := call_of(text)) is not None:
            self.emit("call", call[0])
            self.emit("arguments", call[1])
            return True
        is_cut = not complete and is_json(text, cut=True)
        if is_cut and (name := self.cut_name(cut_name(text))) is not None:
            self.emit("call", name)
            return True
        if not (is_cut and is_constrained):
            otherwise(before + text)
        return False

    def _tail(self) -> Reading:
        """Drop the rest of a call object after its arguments. Other text is left, or content."""
        while not (tail := self.text.lstrip()) and not self.ended:
            yield
        if tail[:1] in ("}", ","):
            parts: list[str] = []
            complete = yield from self.value(parts.append, depth=1)
            if not is_json('{"": 0' + "".join(parts), cut=not complete):
                self.emit_content("".join(parts))

    def cut_name(self, name: str | None) -> str | None:
        """Return the name of a call that was cut before its arguments: the only tool that it can name, if one can."""
        possible = [known for known in self.tool_names if known.startswith(name or "")]
        return possible[0] if len(possible) == 1 else name

    def value(self, emit: Emit, depth: int = 0, stops: re.Pattern[str] = JSON_STOP) -> Checking:
        """Pass on a value as it arrives, see `JsonScanner`. Return whether it is complete."""
        scanner = JsonScanner(depth, stops)
        while True:
            size = scanner.feed(self.text)
            emit(self.text[:size])
            self.text = self.text[size:]
            if scanner.done or self.ended:
                return scanner.done
            yield

    def before(self, markers: Sequence[str], emit: Emit) -> Finding:
        """Pass on the text before the first of some markers. Return the marker, which is left; "" at the end.

        No marker may begin with another one.
        """
        while True:
            at, found = min(
                ((at, marker) for marker in markers if (at := self.text.find(marker)) >= 0), default=(-1, "")
            )
            size = at if found else len(self.text) - (0 if self.ended else ambiguous_len(self.text, markers))
            emit(self.text[:size])
            self.text = self.text[size:]
            if found or self.ended:
                return found
            yield

    def until(self, markers: Sequence[str], emit: Emit) -> Finding:
        """Pass on the text before the first of some markers, and drop the marker. Return it, or "" at the end."""
        found = yield from self.before(markers, emit)
        self.text = self.text[len(found) :]
        return found

    def starts(self, markers: Sequence[str]) -> Finding:
        """Return the marker that the text begins with, or "". It is left."""
        while True:
            found = next((marker for marker in markers if self.text.startswith(marker)), "")
            if found or self.ended or not any(marker.startswith(self.text) for marker in markers):
                return found
            yield

    def begins(self, markers: Sequence[str]) -> Finding:
        """Drop a marker at the text's beginning, with white space before it. Return it, or ""."""
        space = yield from self.space()
        found = yield from self.starts(markers)
        self.text = self.text[len(found) :] if found else space + self.text
        return found

    def space(self, chars: str | None = None) -> Finding:
        """Drop white space, or these characters, up to another one or the end. Return what was dropped."""
        dropped = ""
        while True:
            text = self.text.lstrip(chars)
            dropped += self.text[: len(self.text) - len(text)]
            self.text = text
            if text or self.ended:
                return dropped
            yield

    def skip(self, chars: str | None = None) -> Finding:
        """Drop white space, or these characters. Return the next one; "" when the text ends."""
        yield from self.space(chars)
        return self.text[:1]


@dataclass(frozen=True, slots=True)
class GrammarTools:
    """The parts of a grammar of calls, in Lark."""

    parameters: Mapping[str, Mapping[str, Any]]
    """The JSON schemas of the arguments, by the tools' names."""
    definitions: dict[str, Any]
    """The same, checked for a grammar."""
    fields: Mapping[str, str]
    """The client's fields that have the schemas, by the tools' names."""
    relaxed: list[str]
    """The fields of the schemas that no grammar enforces. Rules add theirs."""
    parallel: bool
    """Several calls are allowed."""
    tokenizer: Tokenizer

    def literal(self, text: str) -> str:
        """Return an expression for a text. Added tokens are named by their ids: a grammar has no bytes for them."""
        ids = self.tokenizer.added_tokens
        parts = self.tokenizer.added_pattern.split(text)
        return " ".join(f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in parts if part)

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return a JSON value of a schema. It may hold what `ref` returns."""
        return json_rule({**schema, "$defs": self.definitions})

    def ref(self, name: str, *path: str) -> dict[str, Any]:
        """Return a schema that refers to a part of a tool's own."""
        return {"$ref": pointer(("$defs", name, *path))}


def json_rule(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": {**compiler_options(), "lenient": True}})


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes tool calls."""

    name: str
    markers: tuple[str, ...]
    """Texts that the parser must see even where they are special tokens of the vocabulary."""
    is_used_by: Callable[[str], bool] = field(repr=False)
    """Returns whether a chat template mentions the format."""
    read: Callable[[TextReader], Reading] = field(repr=False)
    """Reads content and calls; text that is left is content."""
    rules: Callable[[GrammarTools], list[str]] = field(repr=False)
    """Returns the Lark rules of an answer that is only calls; the first is named `calls`."""
    opens: tuple[str, ...] = ()
    """Texts that begin calls."""
    read_calls: Callable[[TextReader, Emit], Checking] | None = field(default=None, repr=False)
    """Reads calls that begin with one of `opens`. Passes on other text, and returns False, if there is none."""
    tokens: tuple[str, ...] = ()
    """Tokens that only vocabularies of this family have."""
