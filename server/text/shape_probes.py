"""Find the shapes of conversations that a template refuses or loses, by rendering small ones.

Each probe is a conversation with words of its own. A template shows it if its text has the words in order. A repair is
chosen if it makes more probes show.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeVar

from server.text.shapes import Shapes, Turn, repaired

_T = TypeVar("_T")
TOOL_NAME: Final = "quokka_tool"
PROBE_WORDS: Final = ("quokkaax", "quokkabx")
PROBE_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "Look a thing up.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


BARE_TOOL: Final = {"type": "function", "function": {"name": TOOL_NAME, "description": None, "parameters": None}}


class ShapeProbe(NamedTuple):
    """A conversation to render."""

    messages: list[Turn]
    tools: list[dict[str, Any]] | None
    switches: Mapping[str, Any] | None = None
    """Given, the text goes on to the answer's beginning."""


Finding = Generator[ShapeProbe, str | None, _T]
"""Yields probes, and takes their texts; None: the template refuses it."""
Prepare = Callable[[Sequence[Turn], list[dict[str, Any]] | None], Sequence[Turn]]


class _Conversation:
    """A probe before it is repaired: turns with words of their own."""

    def __init__(self, *kinds: str, tool: dict[str, Any] | None = None) -> None:
        """`kinds`: roles, `call`, `call cut`, `call long` (its id), `calls` (two), and `empty ROLE`."""
        self.turns: list[Turn] = []
        self.words: list[str] = []
        self.tools = None if tool is None else [tool]
        for kind in kinds:
            self._add(kind)

    def _add(self, kind: str) -> None:
        if kind.startswith("call"):
            form = "call_quokka_0000" if kind == "call long" else "call0000"
            ids = [f"{form}{len(self.words) + at}" for at in range(2 if kind == "calls" else 1)]
            calls = []
            for id_ in ids:
                arguments: Any = {"city": self._word()}
                if kind == "call cut":
                    arguments = f'{{"city": "{self.words[-1]}'
                calls.append({"id": id_, "type": "function", "function": {"name": TOOL_NAME, "arguments": arguments}})
            self.turns.append({"role": "assistant", "content": "", "tool_calls": calls})
        elif kind.startswith("empty"):
            self._turn(kind.removeprefix("empty "), "")
        else:
            self._turn(kind, self._word())

    def _turn(self, role: str, content: str) -> None:
        turn: Turn = {"role": role, "content": content}
        if role == "tool":
            results = [each for each in self.turns if each["role"] == "tool"]
            ids = [call["id"] for each in self.turns for call in each.get("tool_calls", ())]
            turn["tool_call_id"] = ids[len(results)] if len(results) < len(ids) else "call00009"
            turn["name"] = TOOL_NAME
        self.turns.append(turn)

    def _word(self) -> str:
        self.words.append(f"quokka{chr(ord('a') + len(self.words))}x")
        return self.words[-1]

    def with_thoughts(self, content: str = "") -> _Conversation:
        """Give the first call thoughts before its arguments."""
        call = next(turn for turn in self.turns if turn.get("tool_calls"))
        call["content"], call["reasoning_content"] = content, "numbatx"
        self.words.insert(1, "numbatx")
        return self


def _calls(*kinds: str) -> _Conversation:
    return _Conversation(*kinds, tool=PROBE_TOOL)


_TURNS: Final = (
    _Conversation("user", "user", "assistant", "user"),
    _Conversation("user", "assistant", "assistant", "user"),
)
_TOOL_TURNS: Final = (
    _calls("user", "call", "tool", "user"),
    _calls("user", "call", "tool", "assistant", "user"),
    _calls("user", "call", "tool", "call", "tool", "assistant", "user"),
    _calls("user", "calls", "tool", "tool", "assistant", "user"),
    _calls("user", "assistant", "call", "tool", "assistant", "user"),
    _calls("user", "assistant", "user", "call", "tool", "assistant", "user"),
)
_LATE_SYSTEM: Final = (
    _Conversation("system", "user", "system"),
    _Conversation("user", "system", "assistant", "user"),
    _Conversation("user", "assistant", "system", "user"),
)
_EMPTY: Final = {
    "user": _Conversation("empty user", "assistant", "user"),
    "assistant": _Conversation("user", "empty assistant", "user"),
    "system": _Conversation("empty system", "user"),
}


def find_shapes(prepare: Prepare) -> Finding[Shapes]:
    """Return the shapes of a template. `prepare` brings messages, with tools or none, into the form that it renders."""
    finder = _Finder(prepare)
    shapes = yield from finder.fit(Shapes(), [{"lists_tools": True}], _Conversation("user"))
    if not (yield from finder.shows(shapes, _Conversation("user"))):
        return shapes
    for role, probe in _EMPTY.items():
        shapes = yield from finder.fit(shapes, [{"fills": shapes.fills | {role}}], probe)
    has_calls = yield from finder.shows(shapes, _calls("user", "call", "tool", "assistant"))
    turns = (*_TURNS, *_TOOL_TURNS) if has_calls else _TURNS
    choices = [{"turns": turns, "counts_tools": counts} for turns in ("parted", "joined") for counts in (False, True)]
    shapes = yield from finder.fit(shapes, choices, *turns)
    first = _Conversation("assistant", "user"), _Conversation("assistant")
    shapes = yield from finder.fit(shapes, [{"first_user": True}], *first)
    shapes = yield from finder.fit(shapes, [{"first_system": True}], _Conversation("system", "user"))
    shapes = yield from finder.fit(shapes, [{"second_system": True}], _Conversation("system", "system", "user"))
    late = (*_LATE_SYSTEM, _calls("user", "call", "tool", "system")) if has_calls else _LATE_SYSTEM
    shapes = yield from finder.fit(shapes, [{"late_system": True}], *late)
    shapes = yield from finder.fit(shapes, [{"developer": True}], _Conversation("developer", "user"))
    developers = _Conversation("system", "developer", "user"), _Conversation("user", "assistant", "developer", "user")
    shapes = yield from finder.fit(shapes, [{"late_developer": True}], *developers)
    shapes = yield from finder.fit(shapes, [{"orphans": True}], _calls("user", "tool", "assistant", "user"))
    if has_calls:
        shapes = yield from _with_calls(finder, shapes)
    if not (yield from finder.shows(shapes, _calls("user"), TOOL_NAME)):
        needs = replace(shapes, tools_need_system=True)
        shapes = needs if (yield from finder.shows(needs, _calls("user"), TOOL_NAME)) else shapes
    if (yield from finder.renders(shapes, _calls("user"))):
        bare = yield from finder.renders(shapes, _Conversation("user", tool=BARE_TOOL))
        shapes = replace(shapes, fills_tools=not bare)
    return shapes


def _with_calls(finder: _Finder, shapes: Shapes) -> Finding[Shapes]:
    empty = _calls("user", "call", "empty tool", "assistant", "user")
    shapes = yield from finder.fit(shapes, [{"fills": shapes.fills | {"tool"}}], empty)
    missing = _calls("user", "call", "user"), _calls("user", "calls", "tool", "user")
    shapes = yield from finder.fit(shapes, [{"missing_results": True}], *missing)
    late = _calls("user", "call", "user", "tool", "assistant", "user")
    shapes = yield from finder.fit(shapes, [{"late_results": True}], late)
    answered = _calls("user", "call", "tool", "assistant", "tool", "assistant", "user")
    shapes = yield from finder.fit(shapes, [{"answered_results": True}], answered)
    long = _calls("user", "call long", "tool", "assistant", "user")
    shapes = yield from finder.fit(shapes, [{"short_ids": True}], long)
    cut = _calls("user", "call cut", "tool", "assistant")
    shapes = yield from finder.fit(shapes, [{"lists_arguments": True}], cut)
    thinking = _calls("user", "call", "tool").with_thoughts()
    shapes = yield from finder.fit(shapes, [{"thoughts": "reasoning"}, {"thoughts": "thinking"}], thinking)
    both = _calls("user", "call", "tool").with_thoughts("wombatx")
    if not (yield from finder.renders(shapes, both)):
        shapes = replace(shapes, thoughts_alone=True)
    return shapes


class _Finder:
    """Asks for the texts of probes, repaired by the shapes that are known."""

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare

    def fit(self, shapes: Shapes, choices: Sequence[dict[str, Any]], *probes: _Conversation) -> Finding[Shapes]:
        """Return the shapes with the first change that makes the most probes show, if any makes more show."""
        best, most = shapes, (yield from self._count(shapes, probes))
        for choice in choices:
            if most == len(probes):
                break
            changed = replace(shapes, **choice)
            if (count := (yield from self._count(changed, probes))) > most:
                best, most = changed, count
        return best

    def _count(self, shapes: Shapes, probes: Sequence[_Conversation]) -> Finding[int]:
        count = 0
        for probe in probes:
            count += yield from self.shows(shapes, probe)
        return count

    def shows(self, shapes: Shapes, probe: _Conversation, *words: str) -> Finding[bool]:
        text = yield from self._text(shapes, probe)
        offsets = [-1 if text is None else text.find(word) for word in (*words, *probe.words)]
        return -1 not in offsets and offsets == sorted(offsets)

    def renders(self, shapes: Shapes, probe: _Conversation) -> Finding[bool]:
        return (yield from self._text(shapes, probe)) is not None

    def _text(self, shapes: Shapes, probe: _Conversation) -> Finding[str | None]:
        prepared = self._prepare(probe.turns, probe.tools)
        messages, _ = repaired(shapes, prepared, has_tools=bool(probe.tools))
        return (yield ShapeProbe(messages, probe.tools or ([] if shapes.lists_tools else None)))
