"""Find the values of a template's switches for each wish about thoughts, by rendering a short question.

An effort that a template refuses becomes the next stronger one that it takes, else the next weaker. The effort `none`
turns thoughts off where they can be turned off, else it is the weakest. An effort is refused, too, where the template
takes it for another one.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from server.schema.wishes import BUDGET_NAMES, EFFORT_NAMES, EFFORTS, TOGGLES, Wish
from server.text.shape_probes import PROBE_WORDS, Finding, ShapeProbe

_LEVELS: Final = EFFORTS[1:]
_OFF: Final = ("none", "no_think")
"""Efforts by which templates turn thoughts off."""


@dataclass(frozen=True, slots=True)
class Granted:
    """The values that a template takes for a wish."""

    switches: dict[str, Any]
    repairs: tuple[str, ...] = ()
    """`effort` or `thinking`, where the value is not the wish's."""
    ignored: tuple[str, ...] = ()
    """Parts of the wish that change nothing."""


@dataclass(frozen=True, slots=True)
class Grants:
    """The wishes that a template can fulfil."""

    by_wish: Mapping[Wish, Granted] = field(default_factory=dict)
    """By effort and thoughts. Empty: it refuses a plain question."""
    budget: str = ""
    """The switch for a budget; empty: it has none."""

    def of(self, wish: Wish) -> Granted:
        """Return the values for a wish; the wish as it is, if nothing is known."""
        granted = self.by_wish.get(wish._replace(budget=None))
        if granted is None:
            toggles = {} if wish.turns is None else {name: on if wish.turns else off for name, on, off in TOGGLES[::-1]}
            return Granted(toggles if wish.effort is None else dict.fromkeys(EFFORT_NAMES, wish.effort) | toggles)
        if wish.budget is None or wish.turns is False:
            return granted
        if not self.budget:
            return replace(granted, ignored=(*granted.ignored, "budget"))
        return replace(granted, switches=granted.switches | {self.budget: wish.budget})


def question(switches: Mapping[str, Any], *, lists_tools: bool) -> ShapeProbe:
    """Return a short question with values of switches. `lists_tools`: see `Shapes`."""
    return ShapeProbe([{"role": "user", "content": PROBE_WORDS[0]}], [] if lists_tools else None, switches)


def find_grants(names: Collection[str], texts: Collection[str] | None, *, lists_tools: bool) -> Finding[Grants]:
    """Return the wishes that a template can fulfil.

    names: the variables that it reads
    texts: those in it; None: they are not known
    """
    finder = _Finder(names, texts, lists_tools=lists_tools)
    if (yield from finder.text({})) is None:
        return Grants()
    yield from finder.find_switches()
    on = yield from finder.granted(Wish(thinks=True))
    off = yield from finder.granted(Wish(thinks=False))
    is_fixed = (yield from finder.text(on.switches)) == (yield from finder.text(off.switches))
    grants: dict[Wish, Granted] = {}
    for effort, thinks in itertools.product((None, *EFFORTS), (None, True, False)):
        wish = Wish(effort, thinks)
        changes_nothing = is_fixed if effort == "none" else wish.turns and effort in finder.unheeded
        ignored = {"effort": effort is not None and changes_nothing, "thinks": thinks is not None and is_fixed}
        granted = yield from finder.granted(wish)
        grants[wish] = replace(granted, ignored=tuple([part for part, is_named in ignored.items() if is_named]))
    return Grants(grants, finder.budget)


class _Finder:
    """Renders the question with values of switches, each once."""

    def __init__(self, names: Collection[str], texts: Collection[str] | None, *, lists_tools: bool) -> None:
        self._lists_tools = lists_tools
        self._names = names
        self._words = texts
        self._texts: dict[str, str | None] = {}
        self._on: dict[str, Any] = {}
        self._off: dict[str, Any] = {}
        read = EFFORT_NAMES if texts is not None else EFFORT_NAMES[:1]
        self._effort = next((name for name in read if name in names), "")
        self._has_levels = False
        self._offs: Collection[str] = ("none",)
        """Efforts that turn thoughts off."""
        self._refused: Collection[str] = ()
        self.unheeded: Collection[str] = _LEVELS
        """Efforts that change nothing."""
        self.budget = ""

    def text(self, switches: Mapping[str, Any]) -> Finding[str | None]:
        key = repr(sorted(switches.items()))
        if key not in self._texts:
            self._texts[key] = yield question(switches, lists_tools=self._lists_tools)
        return self._texts[key]

    def _texts_of(self, given: Iterable[Mapping[str, Any]]) -> Finding[list[str | None]]:
        texts = []
        for switches in given:
            texts.append((yield from self.text(switches)))
        return texts

    def find_switches(self) -> Finding[None]:
        """Find the switches that change the text."""
        for name, on, off in TOGGLES:
            if name in self._names and name not in self._on:
                first, second = yield from self._texts_of(({name: on}, {name: off}))
                if first != second:
                    self._on[name], self._off[name] = on, off
        for name in BUDGET_NAMES:
            if name in self._names and not self.budget:
                first, second = yield from self._texts_of([{name: num_tokens} for num_tokens in (512, 8192)])
                self.budget = name if first != second else ""
        for name in EFFORT_NAMES:
            if name in self._names and not self._has_levels:
                yield from self._find_levels(name)

    def _find_levels(self, name: str) -> Finding[None]:
        """Find the efforts that a switch takes, if any of them changes the text."""
        efforts = (*_LEVELS, *_OFF)
        found = dict(
            zip(efforts, (yield from self._texts_of([{name: each, **self._on} for each in efforts])), strict=True)
        )
        if len({*found.values()}) == 1:
            return
        self._effort, self._has_levels = name, True
        unread: list[str] = []
        other = None
        if self._words is not None:
            other = yield from self.text({name: PROBE_WORDS[1], **self._on})
            unread = [each for each in efforts if found[each] is not None and found[each] == other]
            unread = [each for each in unread if each not in self._words]
        read = [each for each in _LEVELS if found[each] is not None and each not in unread]
        texts = {found[each] for each in read}
        self._offs = [each for each in _OFF if each not in unread and found[each] not in (None, *texts)]
        self._refused = {each for each in _LEVELS if found[each] is None}
        for rank, each in enumerate(_LEVELS):
            is_between = {*read}.intersection(_LEVELS[:rank]) and {*read}.intersection(_LEVELS[rank:])
            if each in unread and (other in texts or is_between):
                self._refused.add(each)
        is_one = len({found[each] for each in _LEVELS} - {None}) == 1
        self.unheeded = _LEVELS if is_one else {*unread} - self._refused - {*_OFF}

    def granted(self, wish: Wish) -> Finding[Granted]:
        """Return the first choice that the template takes; without one, no values."""
        thinks = wish.turns
        for given in (thinks,) if thinks is None else (thinks, None):
            toggles = {} if given is None else self._on if given else self._off
            is_off = given is False and (yield from self.text(self._off)) != (yield from self.text(self._on))
            effort = wish.effort
            if wish == Wish(thinks=False) and not is_off:
                effort = "none"
            elif wish == Wish(thinks=True) and (yield from self._is_off_by_default(toggles)):
                effort = "medium"
            for taken in self._nearest(effort, is_off=is_off):
                switches = dict(toggles) if taken is None else {self._effort: taken, **toggles}
                if (yield from self.text(switches)) is not None:
                    is_kept = taken == effort or not self._has_levels or wish == Wish(thinks=True)
                    is_kept |= effort == "none" and (is_off or taken in self._offs)
                    names = {"effort": is_kept, "thinking": given == wish.thinks or wish.thinks is None}
                    return Granted(switches, tuple([name for name, is_kept in names.items() if not is_kept]))
        return Granted({}, tuple([name for name, part in zip(("effort", "thinking"), wish, strict=False) if part]))

    def _is_off_by_default(self, toggles: Mapping[str, Any]) -> Finding[bool]:
        if not self._has_levels or not self._offs:
            return False
        texts = yield from self._texts_of([toggles, *[{self._effort: each, **toggles} for each in self._offs]])
        return texts[0] in texts[1:]

    def _nearest(self, effort: str | None, *, is_off: bool) -> Iterator[str | None]:
        """Yield an effort and those in its place, last none at all. `is_off`: thoughts are off."""
        if effort is not None and self._effort:
            if effort == "none":
                yield from ("none", None) if is_off else self._offs
            at = EFFORTS.index(effort)
            yield from [each for each in (*EFFORTS[at:], *EFFORTS[:at][::-1]) if each not in ("none", *self._refused)]
        yield None
