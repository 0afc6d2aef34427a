"""Find the first place where two requests' prompts part, in the words of their bodies, and say what is volatile there.

The bodies are compared field by field. Which of their differences is the first in the prompt, the rendered texts say:
it stands around the first character in which they differ, on both sides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, NamedTuple

ORDER: Final = ("system", "instructions", "tools", "messages", "input", "prompt")
"""The order of fields in most templates; others come behind."""
MAX_DIFFERENCES: Final = 20_000
WINDOW_CHARS: Final = 32
MIN_WINDOW_CHARS: Final = 12
"""The least text that tells a field, where the template has changed the rest of it."""
MAX_OWN_CHARS: Final = 96
"""Text of the template before a message or tool that the other prompt lacks."""
MAX_LEAVES: Final = 8
KEYS: Final = "the order of keys"
ITEMS: Final = "the order of items"
OTHER_KEYS: Final = "keys"

_MONTH: Final = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_DAY: Final = r"(?:Mon|Tue|Tues|Wed|Wednes|Thu|Thurs|Fri|Sat|Satur|Sun)(?:day)?"
_UNIT: Final = r"[\w@+.-]+"
VOLATILE: Final = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("an id", r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"),
        (
            "a date",
            rf"\b\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}|\b\d{{1,2}}[-/.]\d{{1,2}}[-/.]\d{{2,4}}\b|\b{_DAY}\b"
            rf"|\b{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?(?:,? \d{{4}})?"
            rf"|\b\d{{1,2}}\.? {_MONTH}(?: \d{{4}})?|\b{_MONTH} \d{{4}}",
        ),
        (
            "a time",
            r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?: ?[AaPp]\.?[Mm]\b)?(?:Z|[+-]\d{2}:?\d{2})?"
            r"|\b\d{1,2} ?[AaPp][Mm]\b|\b1\d{9}(?:\d{3}|\.\d+)?\b",
        ),
        (
            "a path",
            rf"(?:~|\b[A-Za-z]:|(?<![\w.]))(?:[\\/]+{_UNIT})+[\\/]*|\b(?=[\d.]*[A-Za-z_])[\w.-]+(?:[\\/]{_UNIT})+",
        ),
        (
            "an id",
            r"\b(?=[0-9a-fA-F]*\d)[0-9a-fA-F]{7,}\b|\b(?=\w*\d)(?=\w*[A-Za-z])[A-Za-z]*[_-]?\w{6,}"
            r"|(?<=\d)\.(?=\w*[A-Za-z])\w{3,}\b",
        ),
        ("a number", r"[+-]?\d+(?:[.,]\d+)*%?"),
    )
)
"""Patterns of what changes from request to request, the most telling first."""
_CONTEXT_CHARS: Final = 80
_WRITTEN: Final[tuple[Callable[[str], str], ...]] = (
    lambda text: text,
    str.strip,
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
)
"""The ways in which templates write a text."""


class Difference(NamedTuple):
    """A field, a key or an item in which two bodies differ. `why`: what differs, where that is not the text itself."""

    path: str
    a: str | None
    """None: this body lacks it."""
    b: str | None
    why: str = ""
    leaves: tuple[str, ...] = ()
    """The first texts of what only one body has."""


@dataclass(frozen=True, slots=True)
class Place:
    """The difference at which two prompts part."""

    difference: Difference
    character: int | None
    """In the field; None where a key or an item differs."""
    rest: tuple[int, int] | None = None
    """Where the field ends in both prompts, if it stands there unchanged."""


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Return where two bodies differ, in the order in which most templates write them."""
    found: list[Difference] = []
    names = dict.fromkeys([*ORDER, *a, *b])
    for difference in _walk({name: a[name] for name in names if name in a}, {n: b[n] for n in names if n in b}, ""):
        found.append(difference)
        if len(found) == MAX_DIFFERENCES:
            break
    return found


def _walk(a: Any, b: Any, path: str) -> Iterator[Difference]:
    if isinstance(a, dict) and isinstance(b, dict):
        yield from _walk_object(a, b, path)
    elif isinstance(a, list) and isinstance(b, list):
        is_same = sorted(map(_canonical, a)) == sorted(map(_canonical, b))
        for index, (left, right) in enumerate(zip_longest(a, b, fillvalue=_NOTHING)):
            item = f"{path}[{index}]"
            if left is _NOTHING or right is _NOTHING:
                yield _one_sided(item, left, right)
                return
            for difference in _walk(left, right, item):
                yield difference._replace(why=difference.why or ITEMS) if is_same else difference
    elif a != b or type(a) is not type(b):
        texts = _text(a), _text(b)
        values = [_parsed(text) if path.endswith("arguments") else None for text in texts]
        if None not in values:  # the template writes the values, and not the client's JSON
            yield from _walk(values[0], values[1], path)
        yield Difference(path, *texts)


def _walk_object(a: dict[str, Any], b: dict[str, Any], path: str) -> Iterator[Difference]:
    if path and list(a) != list(b):
        left, right = next(pair for pair in zip_longest(a, b) if pair[0] != pair[1])
        names = [None if name is None else json.dumps(name) for name in (left, right)]
        yield Difference(path, names[0], names[1], KEYS if a.keys() == b.keys() else OTHER_KEYS)
    for name in dict.fromkeys([*a, *b]):
        inner = f"{path}.{name}" if path else name
        if name in a and name in b:
            yield from _walk(a[name], b[name], inner)
        else:
            yield _one_sided(inner, a.get(name, _NOTHING), b.get(name, _NOTHING))


_NOTHING: Final = object()


def _one_sided(path: str, a: Any, b: Any) -> Difference:
    leaves = tuple(_leaves(b if a is _NOTHING else a))[:MAX_LEAVES]
    first = next(iter(leaves), "")
    return Difference(path, None if a is _NOTHING else first, None if b is _NOTHING else first, leaves=leaves)


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif value is not None and (text := _text(value)):
        yield text


def _text(value: Any) -> str:
    """Return a value as templates write it; text parts are joined."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        return "\n".join(str(part.get("text") or "") for part in value)
    return json.dumps(value, ensure_ascii=False)


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def first_place(found: Sequence[Difference], a: str, b: str) -> Place | None:
    """Return the difference at which two rendered prompts part; None: none of them stands there in its own words."""
    at = shared_length(a, b)
    best, best_rank = None, (0, 0)
    for difference in found:
        place, rank = _one_sided_at(difference, a, b, at) if difference.leaves else _at(difference, a, b, at)
        if place is not None and rank > best_rank:
            best, best_rank = place, rank
    return best


def _at(difference: Difference, a: str, b: str, at: int) -> tuple[Place | None, tuple[int, int]]:
    """Return the place if the difference stands around `at`, and how much of it does."""
    if difference.a is None or difference.b is None:
        return None, (0, 0)
    best, best_rank = None, (0, 0)
    for write in _WRITTEN:
        left, right = write(difference.a), write(difference.b)
        shared = shared_length(left, right)
        # Where one text ends, the template's own may go on as the other does.
        spare = min(WINDOW_CHARS, at) if shared == min(len(left), len(right)) else 0
        for begin in range(at - shared, at - shared - spare - 1, -1):
            rank = _rank(left, a, begin, shared), _rank(right, b, begin, shared)
            if min(rank) <= best_rank:
                continue
            best_rank = min(rank)
            whole = rank[0][0] == rank[1][0] == 2
            rest = (begin + len(left), begin + len(right)) if whole else None
            raw = shared_length(difference.a, difference.b)
            best = Place(difference, None if difference.why in (KEYS, OTHER_KEYS) else raw, rest)
    return best, best_rank


def _rank(text: str, prompt: str, begin: int, shared: int) -> tuple[int, int]:
    """Return 2 and the length if the whole text stands at `begin`, 1 if that around the parting does, else 0."""
    if begin >= 0 and text and prompt.startswith(text, begin):
        return 2, len(text)
    for num_before in (WINDOW_CHARS, MIN_WINDOW_CHARS, 0):
        first, last = max(0, shared - num_before), min(len(text), shared + WINDOW_CHARS // 2)
        is_long = begin + first >= 0 and last - first >= MIN_WINDOW_CHARS
        if is_long and prompt.startswith(text[first:last], begin + first):
            return 1, last - first
    return 0, 0


def _one_sided_at(difference: Difference, a: str, b: str, at: int) -> tuple[Place | None, tuple[int, int]]:
    prompt = a if difference.b is None else b
    for leaf in difference.leaves:
        text = leaf[:MAX_OWN_CHARS]
        found = prompt.find(text, max(0, at - len(text)), at + MAX_OWN_CHARS + len(text))
        if found >= 0:
            return Place(difference, None), (1, MAX_OWN_CHARS + 1 - abs(found - at))
    return None, (0, 0)


def shared_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the length of the common beginning of two texts or lists."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def volatile(place: Place) -> str:
    """Say what differs there, in a few words."""
    difference = place.difference
    if difference.why:
        return difference.why
    if difference.leaves or difference.a is None or difference.b is None:
        return "an item that only one has"
    at = shared_length(difference.a, difference.b)
    a, b = (text[max(0, at - _CONTEXT_CHARS) : at + _CONTEXT_CHARS] for text in (difference.a, difference.b))
    at = min(at, _CONTEXT_CHARS)
    if _differs_in_space(difference.a, difference.b):
        return "white space"
    for name, pattern in VOLATILE:
        if all(any(found.start() <= at <= found.end() for found in pattern.finditer(text)) for text in (a, b)):
            return name
    return "other text"


def _differs_in_space(a: str, b: str) -> bool:
    at = shared_length(a, b)
    left, right = a[at : at + 1], b[at : at + 1]
    if not (left.isspace() or right.isspace()):
        return False
    rests = (text[at : at + _CONTEXT_CHARS].split() for text in (a, b))
    return next(iter(next(rests)), "") == next(iter(next(rests)), "")
