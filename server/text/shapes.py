"""Conversations in a shape that a template takes: what it refuses or loses is repaired in place.

shape                               repair
a system message, not the first     a turn of the user, with a mark
a result without its call           a turn of the user, with a mark
a call without its result           a result, which is a mark
two turns of one role               an empty turn between them, or one turn
the assistant's turn first          an empty turn of the user before it
arguments that are no object        an object with one field
an id of a call in another form     nine letters and digits made of it
a tool without a description        an empty description
a tool without parameters           an object without properties

No text moves, so the turns before a repaired one keep their tokens. The mark has brackets that client text never has:
they are replaced there.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from server.event_loop import Steps
from server.text.template_input import arguments_of

OPEN: Final = "\N{LEFT SQUARE BRACKET WITH QUILL}"
CLOSE: Final = "\N{RIGHT SQUARE BRACKET WITH QUILL}"
NOT_JSON: Final = "INVALID_JSON"
"""The field of arguments that are no object, as Anthropic's documents advise."""
_PLAIN_BRACKETS: Final = str.maketrans({OPEN: "[", CLOSE: "]"})
_SHORT_ID: Final = re.compile("[a-zA-Z0-9]{9}")
_EMPTY: Final = f"{OPEN}empty{CLOSE}"
_NO_RESULT: Final = f"{OPEN}no result{CLOSE}"
_SYSTEM_ROLES: Final = ("system", "developer")
_OTHER: Final = {"user": "assistant", "assistant": "user"}
REPAIRS: Final = (
    *("arguments", "call-ids", "call-without-result", "developer", "effort", "empty", "first-turn"),
    *("result-without-call", "same-role", "system", "thinking", "tool-fields", "tools-without-system"),
)
"""Names of repairs."""
Turn = dict[str, Any]
Turns = Literal["free", "parted", "joined"]


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes that a template refuses or loses. By default there are none."""

    turns: Turns = "free"
    """Two turns of one role are parted by an empty one, or joined."""
    counts_tools: bool = False
    """Calls and results are turns of the assistant and the user, which alternate with others."""
    first_user: bool = False
    """The first turn has to be the user's."""
    fills: frozenset[str] = frozenset()
    """Roles whose turns must not be empty."""
    first_system: bool = False
    second_system: bool = False
    """A system message after others at the start."""
    late_system: bool = False
    developer: bool = False
    late_developer: bool = False
    """A message of the developer that is not the first becomes one of the system."""
    orphans: bool = False
    """Results before which there is no call."""
    late_results: bool = False
    """Results that do not follow their calls."""
    answered_results: bool = False
    """Results after an answer to others."""
    missing_results: bool = False
    tools_need_system: bool = False
    lists_tools: bool = False
    """A conversation without tools has an empty list of them."""
    fills_tools: bool = False
    """A tool needs a description and parameters."""
    lists_arguments: bool = False
    short_ids: bool = False
    """Ids of calls have nine letters and digits."""
    thoughts: str = "reasoning_content"
    """The field of thoughts that the template shows."""
    thoughts_alone: bool = False
    """A call has thoughts or content, not both."""

    @property
    def marks(self) -> bool:
        """Return whether a repair may write the mark."""
        systems = self.first_system or self.second_system or self.late_system
        results = self.orphans or self.late_results or self.answered_results or self.missing_results
        return bool(systems or results or self.fills)


def without_marks(value: Any) -> Steps[Any]:
    """Return a value whose texts have no bracket of the mark, in steps."""
    if isinstance(value, str):
        return value if value.isascii() else value.translate(_PLAIN_BRACKETS)
    if isinstance(value, dict):
        items = yield from without_marks(list(value.items()))
        return dict(items)
    if not isinstance(value, list | tuple):
        return value
    replaced = []
    for number, item in enumerate(value, 1):
        replaced.append((yield from without_marks(item)))
        if number % 64 == 0:
            yield
    return replaced


def repaired(shapes: Shapes, turns: Iterable[Turn], *, has_tools: bool) -> tuple[list[Turn], tuple[str, ...]]:
    """Return the turns in a shape that the template takes, and the names of the repairs."""
    found: dict[str, None] = {}
    repairing = [_with_call_forms(shapes, turn, found) for turn in turns]
    repairing = _with_results(shapes, _with_roles(shapes, repairing, found), found)
    if shapes.tools_need_system and has_tools and not (repairing and repairing[0]["role"] in _SYSTEM_ROLES):
        found["tools-without-system"] = None
        repairing.insert(0, _empty(shapes, "system"))
    for turn in repairing if shapes.fills else ():
        if turn["role"] in shapes.fills and _is_empty(turn):
            found["empty"] = None
            turn["content"] = _EMPTY
    first = next((at for at, turn in enumerate(repairing) if turn["role"] not in _SYSTEM_ROLES), len(repairing))
    if shapes.first_user and not (first < len(repairing) and repairing[first]["role"] == "user"):
        found["first-turn"] = None
        repairing.insert(first, _empty(shapes, "user"))
    if shapes.turns != "free":
        repairing = _alternating(shapes, repairing, found)
    return repairing, tuple(found)


def filled(tools: Any) -> Any:
    """Return the tools with descriptions and parameters. Those of another form are kept."""
    if not isinstance(tools, list):
        return tools
    functions = [tool.get("function") if isinstance(tool, dict) else None for tool in tools]
    absent = {"description": "", "parameters": {"type": "object", "properties": {}}}
    return [
        {**tool, "function": {**given, **{key: each for key, each in absent.items() if given.get(key) is None}}}
        if isinstance(given, dict)
        else tool
        for tool, given in zip(tools, functions, strict=True)
    ]


def _with_call_forms(shapes: Shapes, turn: Turn, found: dict[str, None]) -> Turn:
    """Return a copy of a turn whose arguments and thoughts have the template's form."""
    turn = dict(turn)
    if shapes.lists_arguments and turn.get("tool_calls"):
        turn["tool_calls"] = calls = list(turn["tool_calls"])
        for at, call in enumerate(calls):
            function = call.get("function")
            text = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(text, str) and isinstance(arguments_of(text, "arguments"), str):
                found["arguments"] = None
                calls[at] = {**call, "function": {**function, "arguments": {NOT_JSON: text}}}
    if shapes.short_ids and turn.get("tool_calls"):
        turn["tool_calls"] = [call | {"id": _short_id(call.get("id"), found)} for call in turn["tool_calls"]]
    if shapes.short_ids and turn["role"] == "tool":
        turn["tool_call_id"] = _short_id(turn.get("tool_call_id"), found)
    if (thoughts := turn.get("reasoning_content")) is not None and shapes.thoughts != "reasoning_content":
        del turn["reasoning_content"]
        turn[shapes.thoughts] = thoughts
    content = turn["content"]
    if shapes.thoughts_alone and turn.get(shapes.thoughts) and turn.get("tool_calls") and content:
        turn["content"] = f"{turn.pop(shapes.thoughts)}\n\n{content}"
    return turn


def _short_id(id_: Any, found: dict[str, None]) -> str:
    """Return the same id for a call and its result, and from turn to turn."""
    if isinstance(id_, str) and _SHORT_ID.fullmatch(id_):
        return id_
    found["call-ids"] = None
    return hashlib.blake2b(str(id_).encode(), digest_size=5).hexdigest()[:9]


def _with_roles(shapes: Shapes, turns: Sequence[Turn], found: dict[str, None]) -> list[Turn]:
    """Make turns of the user out of messages of the system that the template does not take."""
    kept: list[Turn] = []
    leads = True
    for turn in turns:
        role = turn["role"]
        if role == "developer" and (shapes.developer or (kept and shapes.late_developer)):
            found["developer"] = None
            turn["role"] = role = "system"
        leads = leads and role in _SYSTEM_ROLES
        refused = shapes.late_system if not leads else shapes.second_system if kept else shapes.first_system
        if role in _SYSTEM_ROLES and refused:
            found["system"] = None
            turn = {"role": "user", "content": _marked("system message", turn["content"])}
        kept.append(turn)
    return kept


def _with_results(shapes: Shapes, turns: Sequence[Turn], found: dict[str, None]) -> list[Turn]:
    """Bring results to their calls: those that are missing or stray are repaired."""
    kept: list[Turn] = []
    refused = answered = shapes.orphans
    waiting = list[Any]()
    for turn in turns:
        if turn["role"] == "tool":
            if waiting:
                id_ = turn.get("tool_call_id")
                waiting.remove(id_ if id_ in waiting else waiting[0])
            elif refused:
                found["result-without-call"] = None
                turn = {"role": "user", "content": _marked("tool result", turn["content"])}
        else:
            for id_ in waiting if shapes.missing_results else ():
                found["call-without-result"] = None
                kept.append({"role": "tool", "tool_call_id": id_, "content": _NO_RESULT})
            waiting = [call.get("id") for call in turn.get("tool_calls") or ()]
            if waiting:
                refused, answered = shapes.late_results, shapes.answered_results
            elif turn["role"] == "assistant":
                refused = answered
        kept.append(turn)
    return kept


def _alternating(shapes: Shapes, turns: Sequence[Turn], found: dict[str, None]) -> list[Turn]:
    """Part or join turns of one role."""
    kept: list[Turn] = []
    last = ""
    for turn in turns:
        side, before = _side(shapes, turn), kept[-1] if kept else None
        if before is not None and before["role"] == turn["role"] == "tool":
            side = ""
        if side and side == last:
            found["same-role"] = None
            if shapes.turns == "joined" and before is not None and before["role"] == turn["role"]:
                kept[-1] = _joined(before, turn, shapes.thoughts)
                continue
            kept.append(_empty(shapes, _OTHER[side]))
        last = side or last
        kept.append(turn)
    return kept


def _side(shapes: Shapes, turn: Turn) -> str:
    """Return the role as which a turn counts; "" if it does not."""
    role: str = turn["role"]
    if role == "tool" or turn.get("tool_calls"):
        return ("user" if role == "tool" else "assistant") if shapes.counts_tools else ""
    return role if role in _OTHER else ""


def _joined(first: Turn, second: Turn, thoughts: str) -> Turn:
    both = first | second
    contents = [each["content"] for each in (first, second) if each["content"]]
    if all(isinstance(content, str) for content in contents):
        both["content"] = "\n\n".join(contents)
    else:
        both["content"] = [part for content in contents for part in _parts(content)]
    for name in ("tool_calls", thoughts):
        given = [each[name] for each in (first, second) if each.get(name)]
        if given and (name == thoughts or all(isinstance(items, list) for items in given)):
            both[name] = "\n".join(map(str, given)) if name == thoughts else [item for items in given for item in items]
    return both


def _empty(shapes: Shapes, role: str) -> Turn:
    return {"role": role, "content": _EMPTY if role in shapes.fills else ""}


def _is_empty(turn: Turn) -> bool:
    texts = _texts(turn["content"])
    return all(isinstance(text, str) and not text.strip() for text in texts) and not turn.get("tool_calls")


def _texts(content: Any) -> list[Any]:
    return [part.get("text") for part in _parts(content or "")]


def _marked(kind: str, content: Any) -> Any:
    """Return a content between marks."""
    begin, end = f"{OPEN}{kind}{CLOSE}\n", f"\n{OPEN}/{kind}{CLOSE}"
    texts = _texts(content)
    if all(isinstance(text, str) for text in texts):
        return begin + "\n".join(texts) + end
    return [*_parts(begin), *content, *_parts(end)]


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def as_text(arguments: Any) -> str:
    """Return repaired arguments as a body has them."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
