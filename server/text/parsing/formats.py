"""Tool-call formats of model families, and the prompt for models whose template knows no tools.

hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call> ...          Qwen, Hermes, SmolLM3
llama3   {"name": ..., "parameters": {...}}; ...  alone, or behind <|python_tag|>
mistral  [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]  or  [TOOL_CALLS]name[ARGS]{...} ...
list     [{"name": ..., "parameters": {...}}, ...]             what a grammar enforces for tool_choice "required"
forced   the arguments alone                                   the same for one named function
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from server.text.parsing.reader import (
    CallArguments,
    CallReader,
    CallStart,
    Content,
    JsonScanner,
    OutputDelta,
    ambiguous_len,
    match_head,
)

ToolFormat = Literal["hermes", "llama3", "mistral"]
MARKERS: Final[dict[ToolFormat, tuple[str, ...]]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
}
"""Texts the parser must see even where they are special tokens of the vocabulary."""
MAX_NAME_CHARS: Final = 256
_INSTRUCTION: Final = """You can call functions to answer the user. They are, one JSON schema a line:
<tools>
{tools}
</tools>
To call a function, write a JSON object with its name and arguments between tags, and nothing else:
<tool_call>
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


_Step = Callable[[list[OutputDelta]], bool]


def format_of(template: str) -> ToolFormat | None:
    """Return the format that a chat template mentions, if any."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or ("ipython" in template and "parameters" in template):
        return "llama3"
    return "hermes" if "<tool_call>" in template else None


class CallParser(ABC):
    """Run steps over the buffered text: a step consumes from `_buffer` or sets the next; False waits for more text.

    White space around a call is not content.
    """

    def __init__(self) -> None:
        self._buffer = ""
        self._step: _Step = self._begin
        self._space = ""
        self._any_call = False
        self._reader = CallReader()
        self._after_call: _Step = self._begin

    @abstractmethod
    def _begin(self, deltas: list[OutputDelta]) -> bool: ...

    def feed(self, text: str) -> list[OutputDelta]:
        self._buffer += text
        deltas: list[OutputDelta] = []
        while self._buffer and self._step(deltas):
            pass
        return deltas

    def finish(self) -> list[OutputDelta]:
        deltas: list[OutputDelta] = []
        if self._step == self._call:
            self._reader.finish(deltas)
        elif self._buffer.strip():
            self._content(self._buffer, deltas)
        elif not self._any_call:
            self._space += self._buffer
        if self._space and not self._any_call:
            deltas.append(Content(self._space))
        return deltas

    def _content(self, text: str, deltas: list[OutputDelta]) -> None:
        """Emit text, but hold trailing white space until more content follows."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            deltas.append(Content(kept))

    def _until_marker(self, marker: str, deltas: list[OutputDelta]) -> bool:
        """Emit content up to the marker; return True once the marker is consumed."""
        before, found, after = self._buffer.partition(marker)
        if found:
            self._content(before, deltas)
            self._space = ""
            self._any_call = True
            self._buffer = after
            return True
        keep = ambiguous_len(before, (marker,))
        self._content(before[: len(before) - keep], deltas)
        self._buffer = before[len(before) - keep :]
        return False

    def _skip_space(self) -> bool:
        """Drop leading white space; return whether text is left."""
        self._buffer = self._buffer.lstrip()
        return bool(self._buffer)

    def _read_call(self, after: _Step) -> bool:
        self._reader = CallReader()
        self._after_call = after
        self._step = self._call
        return True

    def _call(self, deltas: list[OutputDelta]) -> bool:
        self._buffer = self._reader.feed(self._buffer, deltas)
        if self._reader.done:
            self._step = self._after_call
        return True

    def _plain(self, deltas: list[OutputDelta]) -> bool:
        self._content(self._buffer, deltas)
        self._buffer = ""
        return False

    def _list(self, deltas: list[OutputDelta]) -> bool:
        """Step between the calls of a list."""
        self._buffer = self._buffer.lstrip(", \t\r\n")
        if not self._buffer:
            return False
        if self._buffer[0] == "]":
            self._buffer = self._buffer[1:]
            self._step = self._begin
            return True
        if self._buffer[0] != "{":
            self._step = self._plain
            return True
        return self._read_call(self._list)


class HermesParser(CallParser):
    def _begin(self, deltas: list[OutputDelta]) -> bool:
        if not self._until_marker("<tool_call>", deltas):
            return False
        self._step = self._inside
        return True

    def _inside(self, deltas: list[OutputDelta]) -> bool:
        if not self._skip_space():
            return False
        if self._buffer[0] == "{":
            return self._read_call(self._behind)
        self._step = self._begin
        return True

    def _behind(self, deltas: list[OutputDelta]) -> bool:
        end = "</tool_call>"
        if not self._skip_space() or (len(self._buffer) < len(end) and end.startswith(self._buffer)):
            return False
        self._buffer = self._buffer.removeprefix(end)
        self._step = self._begin
        return True


class Llama3Parser(CallParser):
    """Accept a call only as the whole answer and with a known tool's name: other JSON is content."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self._names = names

    def _begin(self, deltas: list[OutputDelta]) -> bool:
        tag = "<|python_tag|>"
        text = self._buffer.lstrip()
        if not text or (len(text) < len(tag) and tag.startswith(text)):
            return False
        text = text.removeprefix(tag)
        match match_head(text):
            case "partial":
                return False
            case (name, _) if name in self._names:
                self._buffer = text.lstrip()
                self._any_call = True
                return self._read_call(self._behind)
        self._step = self._plain
        return True

    def _behind(self, deltas: list[OutputDelta]) -> bool:
        self._buffer = self._buffer.lstrip("; \t\r\n")
        if self._buffer:
            self._step = self._begin
        return bool(self._buffer)

    def finish(self) -> list[OutputDelta]:
        if not self._buffer.strip():
            return []
        return super().finish()


class MistralParser(CallParser):
    def __init__(self) -> None:
        super().__init__()
        self._value = JsonScanner()

    def _begin(self, deltas: list[OutputDelta]) -> bool:
        if not self._until_marker("[TOOL_CALLS]", deltas):
            return False
        self._step = self._behind_marker
        return True

    def _behind_marker(self, deltas: list[OutputDelta]) -> bool:
        if not self._skip_space():
            return False
        if self._buffer[0] == "[":
            self._buffer = self._buffer[1:]
            self._step = self._list
        else:
            self._step = self._name
        return True

    def _name(self, deltas: list[OutputDelta]) -> bool:
        name, brace, arguments = self._buffer.partition("{")
        if not brace:
            if len(name) > MAX_NAME_CHARS:
                self._step = self._plain
                return True
            return False
        deltas.append(CallStart(name.replace("[ARGS]", "").strip()))
        self._buffer = brace + arguments
        self._value = JsonScanner()
        self._step = self._arguments
        return True

    def _arguments(self, deltas: list[OutputDelta]) -> bool:
        size = self._value.feed(self._buffer)
        deltas.append(CallArguments(self._buffer[:size]))
        self._buffer = self._buffer[size:]
        if self._value.done:
            self._step = self._begin
        return True


class ListParser(CallParser):
    def _begin(self, deltas: list[OutputDelta]) -> bool:
        if not self._skip_space():
            return False
        if self._buffer[0] != "[":
            self._step = self._plain
            return True
        self._buffer = self._buffer[1:]
        self._any_call = True
        self._step = self._list
        return True


class ForcedParser:
    """Pass all text on as arguments of the one function that the request names."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False

    def feed(self, text: str) -> list[OutputDelta]:
        if not text:
            return []
        deltas: list[OutputDelta] = [] if self._started else [CallStart(self._name)]
        self._started = True
        return [*deltas, CallArguments(text)]

    def finish(self) -> list[OutputDelta]:
        return [] if self._started else [CallStart(self._name)]


def with_tools(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write tools into the system message, and calls and results as text, for a template that knows no tools.

    The answer is read by the `hermes` parser.
    """
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    instruction = _INSTRUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{instruction}"}, *plain[1:]]
    return [{"role": "system", "content": instruction}, *plain]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
    content = "\n".join(part for part in (message["content"], *written) if part)
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}
