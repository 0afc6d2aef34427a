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

    def __init__(self, kinds: str, tool: dict[str, Any] | None = None) -> None:
        """`kinds`: roles, `empty ROLE`, `calls` (two), and `call`, which may be `cut`, `long` (its id), or `thinking`.

        Thoughts may be `thinking aloud`, with content. `tool`: one that is offered without a call.
        """
        self.turns: list[Turn] = []
        self.words: list[str] = []
        self.has_calls = "call" in kinds
        self.tools = [tool or PROBE_TOOL] if tool or self.has_calls or "tool" in kinds else None
        for kind in kinds.split(", "):
            self._add(kind)

    def _add(self, kind: str) -> None:
        if kind.startswith("call"):
            turn: Turn = {"role": "assistant", "content": "wombatx" if "aloud" in kind else "", "tool_calls": []}
            if "thinking" in kind:
                turn["reasoning_content"] = "numbatx"
                self.words.append("numbatx")
            form = "call_quokka_0000" if "long" in kind else "call0000"
            for id_ in [f"{form}{len(self.words) + at}" for at in range(2 if kind == "calls" else 1)]:
                word = self._word()
                arguments = f'{{"city": "{word}' if "cut" in kind else {"city": word}
                call = {"id": id_, "type": "function", "function": {"name": TOOL_NAME, "arguments": arguments}}
                turn["tool_calls"].append(call)
            self.turns.append(turn)
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


_EMPTY: Final = {
    "user": "empty user, assistant, user",
    "assistant": "user, empty assistant, user",
    "system": "empty system, user",
    "tool": "user, call, empty tool, assistant, user",
}
_ORDERS: Final = [{"turns": form, "counts_tools": counts} for form in ("parted", "joined") for counts in (False, True)]
_TURNS: Final = (
    "user, user, assistant, user",
    "user, assistant, assistant, user",
    "user, call, tool, user",
    "user, call, tool, assistant, user",
    "user, call, tool, call, tool, assistant, user",
    "user, calls, tool, tool, assistant, user",
    "user, assistant, call, tool, assistant, user",
    "user, assistant, user, call, tool, assistant, user",
)
_LATE_SYSTEM: Final = ("system, user, system", "user, system, assistant, user", "user, assistant, system, user")
_REFUSED: Final = {
    "first_user": ("assistant, user", "assistant"),
    "first_system": ("system, user",),
    "second_system": ("system, system, user",),
    "late_system": (*_LATE_SYSTEM, "user, call, tool, system"),
    "developer": ("developer, user",),
    "late_developer": ("system, developer, user", "user, assistant, developer, user"),
    "orphans": ("user, tool, assistant, user",),
    "missing_results": ("user, call, user", "user, calls, tool, user"),
    "late_results": ("user, call, user, tool, assistant, user",),
    "answered_results": ("user, call, tool, assistant, tool, assistant, user",),
    "short_ids": ("user, call long, tool, assistant, user",),
    "lists_arguments": ("user, call cut, tool, assistant",),
}
"""The probes of shapes that a template may refuse, in the order in which these are looked for."""


def find_shapes(prepare: Prepare) -> Finding[Shapes]:
    """Return the shapes of a template. `prepare` brings messages, with tools or none, into the form that it renders."""
    finder = _Finder(prepare)
    shapes = yield from finder.fit(Shapes(), [{"lists_tools": True}], "user")
    if not (yield from finder.shows(shapes, _Conversation("user"))):
        return shapes
    finder.has_calls = yield from finder.shows(shapes, _Conversation("user, call, tool, assistant"))
    for role, probe in _EMPTY.items():
        shapes = yield from finder.fit(shapes, [{"fills": shapes.fills | {role}}], probe)
    shapes = yield from finder.fit(shapes, _ORDERS, *_TURNS)
    for name, probes in _REFUSED.items():
        shapes = yield from finder.fit(shapes, [{name: True}], *probes)
    if finder.has_calls:
        fields = [{"thoughts": "reasoning"}, {"thoughts": "thinking"}]
        shapes = yield from finder.fit(shapes, fields, "user, call thinking, tool")
        both = yield from finder.renders(shapes, _Conversation("user, call thinking aloud, tool"))
        shapes = replace(shapes, thoughts_alone=not both)
    asked = _Conversation("user", PROBE_TOOL)
    if not (yield from finder.shows(shapes, asked, TOOL_NAME)):
        needs = replace(shapes, tools_need_system=True)
        shapes = needs if (yield from finder.shows(needs, asked, TOOL_NAME)) else shapes
    if (yield from finder.renders(shapes, asked)):
        bare = yield from finder.renders(shapes, _Conversation("user", BARE_TOOL))
        shapes = replace(shapes, fills_tools=not bare)
    return shapes


class _Finder:
    """Asks for the texts of probes, repaired by the shapes that are known."""

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare
        self.has_calls = False
        """The template shows calls."""

    def fit(self, shapes: Shapes, choices: Sequence[dict[str, Any]], *kinds: str) -> Finding[Shapes]:
        """Return the shapes with the first change that makes the most probes show, if any makes more show."""
        probes = [each for each in map(_Conversation, kinds) if self.has_calls or not each.has_calls]
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
