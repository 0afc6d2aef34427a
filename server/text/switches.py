"""Find what a template makes of each wish about thoughts, by rendering a short question with values of its switches.

A wish is an effort, thoughts on or off, or both. An effort that a template refuses becomes the next stronger one that
it takes, else the next weaker. The effort `none` turns thoughts off where they can be turned off, else it is the
weakest.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from server.text.shape_probes import PROBE_WORDS, Finding, ShapeProbe

EFFORT: Final = "reasoning_effort"
EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""From the weakest."""
THINKING_SWITCHES: Final = ("enable_thinking", "thinking", "enable_reasoning")
"""Switches that turn thoughts on or off."""


class Wish(NamedTuple):
    """A client's wish; None: it has none."""

    effort: str | None = None
    thinks: bool | None = None

    @property
    def turns(self) -> bool | None:
        """Return whether it turns thoughts on or off."""
        return self.effort != "none" if self.thinks is None and self.effort is not None else self.thinks


@dataclass(frozen=True, slots=True)
class Granted:
    """The values that a template takes for a wish."""

    switches: dict[str, Any]
    """The values that it is given."""
    repairs: tuple[str, ...] = ()
    """`effort` or `thinking`, where the value is not the wish's."""
    ignored: tuple[str, ...] = ()
    """The same, where no value changes the prompt."""


Grants = Mapping[Wish, Granted]


def question(switches: Mapping[str, Any], *, lists_tools: bool) -> ShapeProbe:
    """Return a short question with values of switches. `lists_tools`: see `Shapes`."""
    return ShapeProbe([{"role": "user", "content": PROBE_WORDS[0]}], [] if lists_tools else None, switches)


def find_grants(names: Collection[str], *, lists_tools: bool) -> Finding[Grants]:
    """Return what a template that reads these variables makes of each wish. Empty: it refuses a plain question."""
    finder = _Finder(names, lists_tools=lists_tools)
    if (yield from finder.text({})) is None:
        return {}
    yield from finder.find_toggles()
    on = yield from finder.granted(Wish(thinks=True))
    off = yield from finder.granted(Wish(thinks=False))
    is_fixed = (yield from finder.text(on.switches)) == (yield from finder.text(off.switches))
    levels = set()
    for level in EFFORTS[1:]:
        granted = yield from finder.granted(Wish(level))
        levels.add((yield from finder.text(granted.switches)))
    grants: dict[Wish, Granted] = {}
    for effort, thinks in itertools.product((None, *EFFORTS), (None, True, False)):
        wish = Wish(effort, thinks)
        ignored = {
            "effort": effort is not None
            and (is_fixed if effort == "none" else wish.turns is True and len(levels) == 1),
            "thinking": thinks is not None and is_fixed,
        }
        granted = yield from finder.granted(wish)
        grants[wish] = replace(granted, ignored=tuple([name for name, is_named in ignored.items() if is_named]))
    return grants


class _Finder:
    """Renders the question with values of switches, each once."""

    def __init__(self, names: Collection[str], *, lists_tools: bool) -> None:
        self._lists_tools = lists_tools
        self._toggles = [name for name in THINKING_SWITCHES if name in names]
        self._has_effort = EFFORT in names
        self._texts: dict[tuple[tuple[str, Any], ...], str | None] = {}

    def text(self, switches: Mapping[str, Any]) -> Finding[str | None]:
        key = tuple(switches.items())
        if key not in self._texts:
            self._texts[key] = yield question(switches, lists_tools=self._lists_tools)
        return self._texts[key]

    def find_toggles(self) -> Finding[None]:
        """Keep the switches that change the text."""
        found = []
        for name in self._toggles:
            if (yield from self.text({name: True})) != (yield from self.text({name: False})):
                found.append(name)
        self._toggles = found

    def granted(self, wish: Wish) -> Finding[Granted]:
        """Return the first choice that the template takes; without one, the wish as it is."""
        thinks = wish.turns
        for given in (thinks,) if thinks is None else (thinks, None):
            toggles = {} if given is None else dict.fromkeys(self._toggles, given)
            on = dict.fromkeys(toggles, True)
            is_off = given is False and (yield from self.text(toggles)) != (yield from self.text(on))
            effort = "none" if wish == Wish(thinks=False) and not is_off else wish.effort
            for taken in _nearest(effort, is_off=is_off) if self._has_effort else (None,):
                switches = toggles if taken is None else {EFFORT: taken} | toggles
                if (yield from self.text(switches)) is not None:
                    is_kept = taken == effort or not self._has_effort or (is_off and effort == "none")
                    names = {"effort": is_kept, "thinking": given == wish.thinks or wish.thinks is None}
                    return Granted(switches, tuple([name for name, is_kept in names.items() if not is_kept]))
        return as_it_is(wish)


def as_it_is(wish: Wish) -> Granted:
    """Return a wish whose values the template is given unchanged."""
    toggles: dict[str, Any] = {} if wish.turns is None else dict.fromkeys(THINKING_SWITCHES, wish.turns)
    return Granted(toggles if wish.effort is None else {EFFORT: wish.effort} | toggles)


def _nearest(effort: str | None, *, is_off: bool) -> Iterator[str | None]:
    """Yield an effort and those in its place: stronger ones, weaker ones, none at all. `is_off`: thoughts are off."""
    if effort is not None:
        at = EFFORTS.index(effort)
        yield effort
        if not (is_off and effort == "none"):
            yield from EFFORTS[at + 1 :]
            yield from reversed(EFFORTS[1:at])
    yield None


def wish_of(switches: Mapping[str, Any], effort: str | None, thinks: bool | None) -> tuple[Wish, dict[str, Any]]:
    """Return the wish of a request, and its other switches. Those come before its fields for the same."""
    others = dict(switches)
    if others.get(EFFORT) in EFFORTS:
        effort = others.pop(EFFORT)
    toggles = {name: others[name] for name in THINKING_SWITCHES if isinstance(others.get(name), bool)}
    if len(values := {*toggles.values()}) == 1:
        thinks = values.pop()
        others = {name: value for name, value in others.items() if name not in toggles}
    return Wish(effort, thinks), others
