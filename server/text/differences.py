"""Find the field of two bodies at which their prompts part, and what is volatile there.

The bodies are compared field by field. Of their differences, the one around the first character in which the rendered
texts differ is where the prompts part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice, zip_longest
from operator import itemgetter
from typing import Any, Final, NamedTuple

ORDER: Final = ("system", "instructions", "tools", "messages", "input", "prompt")
"""The order of fields in most templates; others follow."""
MAX_DIFFERENCES: Final = 20_000
WINDOW_CHARS: Final = 32
MIN_WINDOW_CHARS: Final = 12
"""The least text that identifies a field of which the template has changed the rest."""
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
"""Patterns of what changes from request to request, the most specific first."""
_CONTEXT_CHARS: Final = 80
_WRITTEN: Final[tuple[Callable[[str], str], ...]] = (
    lambda text: text,
    str.strip,
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
)
"""The ways in which templates write a text."""
_WHOLE: Final = 1 << 30
"""The rank of a text that the prompt holds unchanged, next to its length."""
_NOTHING: Final = object()


class Difference(NamedTuple):
    """A field, a key or an item in which two bodies differ. `why`: what differs, where that is not the text itself."""

    path: str
    a: str | None
    """None: this body lacks it."""
    b: str | None
    why: str = ""
    leaves: tuple[str, ...] = ()
    """The first texts of an item that only one body has."""


class Place(NamedTuple):
    """The difference at which two prompts part."""

    difference: Difference
    character: int | None = None
    """In the field; None where a key or an item differs."""
    rest: tuple[int, int] | None = None
    """Where the field ends in both prompts, if they hold it unchanged."""


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Return where two bodies differ, in the order in which most templates write them."""
    names = dict.fromkeys([*ORDER, *a, *b])
    first, second = ({name: body[name] for name in names if name in body} for body in (a, b))
    return list(islice(_walk(first, second, ""), MAX_DIFFERENCES))


def _walk(a: Any, b: Any, path: str) -> Iterator[Difference]:
    if a is _NOTHING or b is _NOTHING:
        leaves = tuple(islice(_leaves(b if a is _NOTHING else a), MAX_LEAVES))
        first = leaves[0] if leaves else ""
        yield Difference(path, None if a is _NOTHING else first, None if b is _NOTHING else first, leaves=leaves)
    elif isinstance(a, dict) and isinstance(b, dict):
        yield from _walk_objects(a, b, path)
    elif isinstance(a, list) and isinstance(b, list):
        yield from _walk_lists(a, b, path)
    elif a != b or type(a) is not type(b):
        texts = _text(a), _text(b)
        values = [_parsed(text) if path.endswith("arguments") else None for text in texts]
        if None not in values:  # the template writes the values, and not the client's JSON
            yield from _walk(values[0], values[1], path)
        yield Difference(path, *texts)


def _walk_objects(a: dict[str, Any], b: dict[str, Any], path: str) -> Iterator[Difference]:
    if path and list(a) != list(b):
        left, right = next(pair for pair in zip_longest(a, b) if pair[0] != pair[1])
        names = [None if name is None else json.dumps(name) for name in (left, right)]
        yield Difference(path, names[0], names[1], KEYS if a.keys() == b.keys() else OTHER_KEYS)
    for name in dict.fromkeys([*a, *b]):
        yield from _walk(a.get(name, _NOTHING), b.get(name, _NOTHING), f"{path}.{name}" if path else name)


def _walk_lists(a: list[Any], b: list[Any], path: str) -> Iterator[Difference]:
    first, second = (sorted(json.dumps(item, sort_keys=True) for item in side) for side in (a, b))
    for index, (left, right) in enumerate(zip_longest(a, b, fillvalue=_NOTHING)):
        for difference in _walk(left, right, f"{path}[{index}]"):
            is_moved = first == second and not difference.why
            yield difference._replace(why=ITEMS) if is_moved else difference
        if left is _NOTHING or right is _NOTHING:
            return


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
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
    with suppress(ValueError, RecursionError):
        if isinstance(value := json.loads(text), dict):
            return value
    return None


def first_place(found: Sequence[Difference], a: str, b: str) -> Place | None:
    """Return the difference at which two rendered prompts part; None if they hold none of them."""
    at = shared_length(a, b)
    ranked = (rank for difference in found for rank in _places(difference, a, b, at))
    rank, place = max(ranked, key=itemgetter(0), default=(0, None))
    return place if rank else None


def _places(difference: Difference, a: str, b: str, at: int) -> Iterator[tuple[int, Place]]:
    """Yield where the difference may be around `at`, each with a rank: how much of its text the prompts hold."""
    if difference.leaves:
        prompt = a if difference.b is None else b
        for text in (leaf[:MAX_OWN_CHARS] for leaf in difference.leaves):
            found = prompt.find(text, max(0, at - len(text)), at + MAX_OWN_CHARS + len(text))
            if found >= 0:
                yield MAX_OWN_CHARS + 1 - abs(found - at), Place(difference)
                return
    if difference.leaves or difference.a is None or difference.b is None:
        return
    character = None if difference.why in (KEYS, OTHER_KEYS) else shared_length(difference.a, difference.b)
    for write in _WRITTEN:
        left, right = write(difference.a), write(difference.b)
        shared = shared_length(left, right)
        # Where one text ends, the template's own may go on as the other does.
        spare = min(WINDOW_CHARS, at) if shared == min(len(left), len(right)) else 0
        for begin in range(at - shared, at - shared - spare - 1, -1):
            rank = min(_rank(left, a, begin, shared), _rank(right, b, begin, shared))
            rest = (begin + len(left), begin + len(right)) if rank >= _WHOLE else None
            yield rank, Place(difference, character, rest)


def _rank(text: str, prompt: str, begin: int, shared: int) -> int:
    """Return how much of the text the prompt holds if it begins at `begin`: all, or some around the parting."""
    if begin >= 0 and text and prompt.startswith(text, begin):
        return _WHOLE + len(text)
    for num_before in (WINDOW_CHARS, MIN_WINDOW_CHARS, 0):
        first, last = max(0, shared - num_before), min(len(text), shared + WINDOW_CHARS // 2)
        is_long = begin + first >= 0 and last - first >= MIN_WINDOW_CHARS
        if is_long and prompt.startswith(text[first:last], begin + first):
            return last - first
    return 0


def shared_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the length of the common beginning of two texts or lists."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def volatile(place: Place) -> str:
    """Return what differs there, in a few words."""
    _, first, second, why, leaves = place.difference
    if why:
        return why
    if leaves or first is None or second is None:
        return "an item that only one has"
    at = shared_length(first, second)
    rests = [text[at : at + _CONTEXT_CHARS] for text in (first, second)]
    has_space = any(rest[:1].isspace() for rest in rests)
    if has_space and rests[0].split()[:1] == rests[1].split()[:1]:
        return "white space"
    begin = max(0, at - _CONTEXT_CHARS)
    contexts = [text[begin : at + _CONTEXT_CHARS] for text in (first, second)]
    for name, pattern in VOLATILE:
        if all(any(m.start() <= at - begin <= m.end() for m in pattern.finditer(text)) for text in contexts):
            return name
    return "other text"
