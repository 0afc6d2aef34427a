"""The sandbox of chat templates: jinja2's immutable one, with the filters and tags that these templates use.

A template comes with the model's files and is code. It can neither reach Python's objects nor change its input.
jinja2's sandbox does not bound work, such as loops that write nothing or `'x' * 10**9`. Here every loop checks the
clock at each turn, and products are bounded.
"""

from __future__ import annotations

import json
import time
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.event_loop import Steps

MAX_RENDER_S: Final = 5.0  # templates take milliseconds
MAX_PRODUCT: Final = 1 << 20
"""Characters or items in a product, bits in a power."""
_CHECK: Final = "headstart_check_clock"


class TemplateError(ValueError):
    """The model's template does not compile."""


class _GenerationTag(Extension):
    """Accept `{% generation %}`, which marks the assistant's part for training and means nothing in a prompt."""

    tags = {"generation"}  # noqa: RUF012 (the declaration of jinja2's own class)

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as Hugging Face's renderer does: jinja2's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with the filters, tags and globals that chat templates use."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Raise TemplateRuntimeError for a product that is too large."""
        integers = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and integers and left.bit_length() * abs(right) > MAX_PRODUCT:
            raise jinja2.TemplateRuntimeError("a power is too large")
        for text, times in ((left, right), (right, left)):
            if isinstance(text, str | list | tuple) and isinstance(times, int) and len(text) * times > MAX_PRODUCT:
                raise jinja2.TemplateRuntimeError("a product is too long")
        return super().call_binop(context, operator, left, right)

    def bounded(self, tree: jinja2.nodes.Template) -> jinja2.Template:
        """Compile a template whose loops check the clock. Render it with the variables of a `RenderClock`."""
        for loop in tree.find_all(jinja2.nodes.For):
            check = jinja2.nodes.Call(jinja2.nodes.Name(_CHECK, "load"), [], [], None, None)
            loop.body.insert(0, jinja2.nodes.ExprStmt(check).set_lineno(loop.lineno))
        template = self.from_string(tree)
        template.globals = dict(template.globals)  # renderings copy it: a plain dict is quick to copy
        return template


class StepTooLongError(Exception):
    """The template held the event loop for too long without writing."""


class RenderClock:
    """Limits the processor time of one rendering, on one thread. Every loop of the template checks it.

    A busy machine changes no answer: what a template is found to take decides how later prompts are written.
    """

    def __init__(self, max_s: float = MAX_RENDER_S, max_step_s: float = float("inf")) -> None:
        """`max_step_s`: the longest time between two calls of `rest`."""
        self._left_s, self._max_step_s = max_s, max_step_s
        self.begin()

    def begin(self) -> None:
        self._begun_s = time.thread_time()

    def rest(self) -> Steps[None]:
        """Pause the clock while others use the event loop."""
        self._left_s -= time.thread_time() - self._begun_s
        yield
        self.begin()

    def variables(self) -> dict[str, Any]:
        return {_CHECK: self._check}

    def _check(self) -> None:
        """Raise TemplateRuntimeError after `max_s`, StepTooLongError after `max_step_s`."""
        running_s = time.thread_time() - self._begun_s
        if running_s > self._left_s:
            raise jinja2.TemplateRuntimeError(f"it took more than {MAX_RENDER_S:g} s")
        if running_s > self._max_step_s:
            raise StepTooLongError
