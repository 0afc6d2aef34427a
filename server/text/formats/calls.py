"""One reader for the calls of all families that write them between markers.

    content  section  call  name  arguments  end  call ...  end of the section  content

A family is a `Syntax`. Markers that no call follows are content.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from server.text.detokenizer import ambiguous_len
from server.text.formats.arguments import Tags
from server.text.formats.base import Checking, Emit, Reading, TextReader

MAX_NAME_CHARS: Final = 256  # twice the limit for a tool's name
_NAME: Final = r"[\w.:/-]+"
Arguments = Literal["object", "json", "python"]


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form of calls that a grammar makes the model write: the texts around all calls, and around each name."""

    call: tuple[str, str, str]
    """Before the name, after it, and after the arguments. Without a name: before and after a call object."""
    section: tuple[str, str] = ("", "")
    separator: str = ""
    is_list: bool = False
    """A section holds a JSON list of call objects."""
    arguments_key: str = "arguments"
    """The key of the arguments in a call object."""


@dataclass(frozen=True, slots=True)
class Syntax:
    """How a family of models writes calls."""

    opens: tuple[str, ...]
    """Texts that begin calls or a call. A name or a value follows the last."""
    closes: tuple[str, ...]
    """Texts that stand after a call."""
    form: CallForm
    arguments: Arguments = "json"
    """Without `tags`."""
    name_ends: tuple[str, ...] = ()
    """Texts that end a name, if calls are no objects. `{` and `<` are the first characters of the arguments."""
    name: str = rf"[\"']?({_NAME})[\"']?"
    """A pattern; its group is the name."""
    tags: Tags | None = None
    extra: tuple[str, ...] = ()
    """Further special tokens within calls."""

    def read(self, reader: TextReader) -> Reading:
        """Read content and calls to the end."""
        while (yield from reader.before(self.opens, reader.emit_content)):
            yield from self.read_calls(reader, reader.emit_content)

    def read_calls(self, reader: TextReader, otherwise: Emit) -> Checking:
        """Read the calls that begin here, with their markers. Return whether there is one."""
        markers, has_call, is_open = "", False, False
        while True:
            space = yield from reader.space()
            marker = yield from reader.starts((*self.opens, *self.closes))
            if marker:
                reader.text = reader.text[len(marker) :]
                is_open = marker in self.opens
                markers += space + marker if markers or is_open else ""
            elif markers or (is_open and reader.text[:1] == "{" and self.arguments == "object"):
                if not (yield from self._call(reader, markers + space, otherwise)):
                    return has_call
                markers, has_call = "", True
            else:
                is_cut = reader.ended and any(marker.startswith(reader.text) for marker in self.closes)
                reader.text = "" if is_cut else space + reader.text
                return has_call

    def _call(self, reader: TextReader, markers: str, otherwise: Emit) -> Checking:
        """Read what follows the markers. Return whether it is a call; other text goes to `otherwise`."""
        start = reader.text[:1]
        if start == "{":
            return (yield from reader.call(markers, otherwise))
        if start == "[":
            return (yield from reader.call_list(markers, otherwise))
        is_call = yield from self._named(reader)
        if not is_call:
            otherwise(markers)
        return is_call

    def _named(self, reader: TextReader) -> Checking:
        """Read a name and its arguments. Return False, and leave the text, if there is no call."""
        head, stop = yield from self._head(reader)
        name = re.fullmatch(self.name, head.strip())
        if name is None:
            return False
        size = len(head) + (0 if stop in ("{", "<") else len(stop))
        taken, reader.text = reader.text[:size], reader.text[size:]
        space = yield from reader.space()
        if stop and not (yield from self._has_arguments(reader)):
            reader.text = taken + space + reader.text
            return False
        if not stop:
            if reader.tool_names and not any(known.startswith(name[1]) for known in reader.tool_names):
                reader.text = taken + space + reader.text
                return False
            reader.emit("call", reader.cut_name(name[1]) or "")
            reader.text = ""
        else:
            reader.emit("call", name[1])
            yield from self._arguments(reader, name[1])
        return True

    def _head(self, reader: TextReader) -> Generator[None, None, tuple[str, str]]:
        """Return the text before the first of `name_ends`, and that end: "" if the text ends or holds no name."""
        while True:
            text = reader.text
            at, stop = min(((at, stop) for stop in self.name_ends if (at := text.find(stop)) >= 0), default=(-1, ""))
            size = at if stop else len(text) - ambiguous_len(text, self.name_ends)
            if not self.name_ends or size > MAX_NAME_CHARS:
                return "", ""
            if stop or reader.ended:
                return text[:size], stop
            yield

    def _has_arguments(self, reader: TextReader) -> Checking:
        """Return whether arguments begin here, or the call ends without any."""
        if self.tags is None and reader.text[:1] == "{":
            return True
        markers = (self.tags.opening, *self.closes) if self.tags is not None else self.closes
        found = yield from reader.starts(markers)
        is_cut = reader.ended and (not reader.text or any(marker.startswith(reader.text) for marker in markers))
        return bool(found) or is_cut

    def _arguments(self, reader: TextReader, name: str) -> Reading:
        if self.tags is not None:
            yield from self.tags.read(reader, name, self.closes)
        elif reader.text[:1] != "{":
            if (yield from reader.starts(self.closes)):
                reader.emit("arguments", "{}")
        else:
            yield from reader.value(partial(reader.emit, "arguments"))
