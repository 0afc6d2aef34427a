"""Bound time and size in jinja2's immutable sandbox: a template comes with a model's files, and is code.

The sandbox keeps templates from Python's objects, but not from work without end: loops that write nothing, and products
such as `'x' * 10**9`. So every loop checks the clock at each turn, and products are bounded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import jinja2
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.event_loop import Steps

MAX_RENDER_S: Final = 5.0
MAX_PRODUCT: Final = 1 << 20
"""Characters or items in a product, bits in a power."""
_CHECK: Final = "headstart_check_clock"


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Renders templates whose variables include those of a `RenderClock`."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Raise TemplateRuntimeError for a product that is too large."""
        integers = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and integers and left.bit_length() * abs(right) > MAX_PRODUCT:
            raise jinja2.TemplateRuntimeError("a power is too large")
        for text, times in ((left, right), (right, left)):
            if isinstance(text, str | list | tuple) and isinstance(times, int) and len(text) * times > MAX_PRODUCT:
                raise jinja2.TemplateRuntimeError("a product is too long")
        return super().call_binop(context, operator, left, right)

    def bounded_template(self, source: str) -> jinja2.Template:
        """Compile a template. Raises TemplateError or RecursionError."""
        tree = self.parse(source)
        for loop in tree.find_all(jinja2.nodes.For):
            check = jinja2.nodes.Call(jinja2.nodes.Name(_CHECK, "load"), [], [], None, None)
            loop.body.insert(0, jinja2.nodes.ExprStmt(check).set_lineno(loop.lineno))
        template = self.from_string(tree)
        template.globals = dict(
            template.globals
        )  # a plain dict: renderings copy it, and a chain of maps is slow to copy
        return template


class HeldTooLongError(Exception):
    """The template wrote nothing for too long."""


class RenderClock:
    """Limits the time of one rendering. Every loop of the template checks it."""

    __slots__ = ("_held_until_s", "_hold_s", "_max_s", "_until_s")

    def __init__(self, max_s: float = MAX_RENDER_S, hold_s: float = float("inf")) -> None:
        """`hold_s`: the longest time between two calls of `rest`."""
        self._max_s, self._hold_s = max_s, hold_s
        self.begin()

    def begin(self) -> None:
        now_s = time.monotonic()
        self._until_s, self._held_until_s = now_s + self._max_s, now_s + self._hold_s

    def rest(self) -> Steps[None]:
        """Pause the clock while others use the event loop."""
        left_s = self._until_s - time.monotonic()
        yield
        self.begin()
        self._until_s += left_s - self._max_s

    def variables(self) -> dict[str, Callable[[], None]]:
        return {_CHECK: self._check}

    def _check(self) -> None:
        """Raise TemplateRuntimeError after `max_s`, HeldTooLongError after `hold_s`."""
        now_s = time.monotonic()
        if now_s > self._until_s:
            raise jinja2.TemplateRuntimeError(f"it took more than {self._max_s:g} s")
        if now_s > self._held_until_s:
            raise HeldTooLongError
