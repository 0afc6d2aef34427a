"""The sandbox of chat templates: jinja2's immutable one, with the filters and tags that these templates use.

A template comes with the model's files and is code. It can neither reach Python's objects nor change its input.
jinja2's sandbox does not bound work, such as loops that write nothing or `'x' * 10**9`. Here each turn of a loop, its
condition, and each call check the clock. What an operator makes is bounded. A template that wants to can still take
memory, by filters, methods or nested lists.
"""

from __future__ import annotations

import json
import re
import time
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
import jinja2.nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.event_loop import Steps

MAX_RENDER_S: Final = 5.0  # templates take milliseconds
MAX_SIZE: Final = 1 << 24
"""Characters or items in what an operator makes; bits of a number, times 16."""
_SIZED: Final = (str, list, tuple)
_WIDE: Final = re.compile(r"%[^a-zA-Z%]*(\*|[0-9]{7})")  # a width or precision, or one that is an argument
_CLOCK: Final = "render clock"  # no template can set a name with a space


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


class _CodeGenerator(CodeGenerator):
    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:
        """Call the environment for `~`, as for the operators that it intercepts."""
        self.write("environment.concatenated([")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("])")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with the filters, tags and globals that chat templates use."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self.globals[_CLOCK] = RenderClock(float("inf"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Raise TemplateRuntimeError for a result that is too large."""
        if operator == "*":
            for sized, number in ((left, right), (right, left)):
                if isinstance(sized, _SIZED) and isinstance(number, int):
                    _limit(len(sized) * number)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _limit(16 * left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise jinja2.TemplateRuntimeError("a width is too large")
        return _limited(super().call_binop(context, operator, left, right))

    def concatenated(self, values: list[Any]) -> str:
        """Return the value of `~`. Raises TemplateRuntimeError."""
        texts = [value if isinstance(value, str) else str(value) for value in values]
        _limit(sum(map(len, texts)))
        return "".join(texts)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a macro or a function."""
        self.check(context)
        return super().call(context, function, *args, **kwargs)

    def check(self, context: Context) -> bool:
        """Check the clock of the rendering, and return True."""
        clock: RenderClock = context.parent[_CLOCK]
        clock.check()
        return True

    def bounded(self, tree: jinja2.nodes.Template) -> jinja2.Template:
        """Compile a template whose loops check the clock. Render it with the variables of a `RenderClock`."""
        check = jinja2.nodes.EnvironmentAttribute("check(context)")  # compiled to `environment.check(context)`
        for loop in tree.find_all(jinja2.nodes.For):
            loop.body.insert(0, jinja2.nodes.ExprStmt(check).set_lineno(loop.lineno))
            loop.test = loop.test and jinja2.nodes.And(check, loop.test)
        template = self.from_string(tree)
        template.globals = dict(template.globals)  # renderings copy it: a plain dict is quick to copy
        return template


def _limited(value: Any) -> Any:
    """Return a value. Raises TemplateRuntimeError if it is too large."""
    if isinstance(value, _SIZED):
        _limit(len(value))
    elif isinstance(value, int):
        _limit(16 * value.bit_length())
    return value


def _limit(size: int) -> None:
    if size > MAX_SIZE:
        raise jinja2.TemplateRuntimeError("a text, a list or a number is too large")


class StepTooLongError(Exception):
    """The template held the event loop for too long without writing."""


class RenderClock:
    """Limits the processor time of one rendering, on one thread. Every loop of the template checks it.

    A busy machine changes no answer: what a template is found to take decides how later prompts are written.
    """

    def __init__(self, max_s: float = MAX_RENDER_S, max_step_s: float = float("inf")) -> None:
        """`max_step_s`: the longest time between two calls of `rest`."""
        self._max_s = self._left_s = max_s
        self._max_step_s = max_step_s
        self.begin()

    def begin(self) -> None:
        self._begun_s = time.thread_time()

    def rest(self) -> Steps[None]:
        """Pause the clock while others use the event loop."""
        self._left_s -= time.thread_time() - self._begun_s
        yield
        self.begin()

    def variables(self) -> dict[str, Any]:
        return {_CLOCK: self}

    def check(self) -> None:
        """Raise TemplateRuntimeError after `max_s`, StepTooLongError after `max_step_s`."""
        running_s = time.thread_time() - self._begun_s
        if running_s > self._left_s:
            raise jinja2.TemplateRuntimeError(f"it took more than {self._max_s:g} s")
        if running_s > self._max_step_s:
            raise StepTooLongError
