"""The sandbox of chat templates: jinja2's immutable one, with the filters and tags that these templates use.

A template comes with the model's files and is code. It can neither reach Python's objects nor change its input.
jinja2's sandbox does not bound work. Here the `RenderClock` of the thread checks the time at loops, calls and long
values. It measures what literals, slices, operators, filters, functions and blocks make, with all that is in it. So
what takes such a value takes little time. What could make far more than it gets is measured before.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from datetime import datetime
from types import GeneratorType
from typing import Any, Final, NoReturn

import jinja2
import jinja2.nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from server.event_loop import Steps

MAX_RENDER_S: Final = 5.0  # templates take milliseconds
MAX_SIZE: Final = 1 << 17
"""A character is 1, an item of a list 8, of a tuple 64. What a value holds counts as often as it is there."""
MAX_WORK: Final = 24 << 20
"""Bytes of all that is made; a turn of a loop or a call counts as 256."""
_MAX_BITS: Final = 60  # of a number; hashes of longer ones can be made to collide
_SMALL: Final = 256
_COMPARED: Final = 2048  # work of what may read long values
_WATCHED: Final = 1 << 16  # work between two looks at the clock
_CONTAINERS: Final = frozenset({list, tuple, dict, *map(type, ({}.keys(), {}.values(), {}.items()))})
_WIDE: Final = re.compile(r"[%{][^a-zA-Z%}]*(\*|\{|[0-9]{4})")  # a width or precision, or one that is an argument
_NO_FILTERS: Final = (
    *("batch", "center", "filesizeformat", "groupby", "pprint", "random", "slice", "striptags", "sum", "urlencode"),
    *("urlize", "wordwrap", "xmlattr"),
)
"""Filters for web pages, whose work nothing bounds. A template that has one does not compile."""
_CHEAP: Final = frozenset({"abs", "attr", "count", "d", "default", "first", "items", "last", "length", "safe"})
"""Filters that make nothing."""
_NO_METHODS: Final = frozenset(
    {"center", "encode", "expandtabs", "format_map", "ljust", "rjust", "to_bytes", "translate", "zfill"}
)


class TemplateError(ValueError):
    """The model's template does not compile."""


class _GenerationTag(Extension):
    """Accept `{% generation %}`, which marks the assistant's part for training and means nothing in a prompt."""

    tags = {"generation"}  # noqa: RUF012 (the declaration of jinja2's own class)

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    def __repr__(self) -> str:
        return "<Namespace>"  # it may hold another one many times


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


class StepTooLongError(Exception):
    """The template held the event loop for too long without writing."""


class RenderClock:
    """Limits the work of one rendering, on one thread: processor time and sizes.

    A busy machine changes no answer: what a template is found to take decides how later prompts are written.
    """

    def __init__(self, max_s: float = MAX_RENDER_S, max_step_s: float = float("inf")) -> None:
        """`max_step_s`: the longest time between two calls of `rest`."""
        self._max_s = self._left_s = max_s
        self._max_step_s = max_step_s
        self._max_size: float = MAX_SIZE
        self._left: float = MAX_WORK
        self._look_at: float = MAX_WORK
        self._given: Mapping[str, Any] | None = None
        self._sizes: dict[int, tuple[Any, int]] = {}  # with the container: its id stays its own
        self._begun_s = time.thread_time()

    def begin(self, variables: Mapping[str, Any]) -> None:
        """Start on this thread. A long conversation raises the limits of sizes."""
        self._given = variables
        self._resume()

    def end(self) -> None:
        """Forget what was measured."""
        self._given = None
        self._sizes.clear()

    def rest(self) -> Steps[None]:
        """Pause the clock while others use the event loop."""
        self._left_s -= time.thread_time() - self._begun_s
        yield
        self._resume()

    def _resume(self) -> None:
        self._begun_s = time.thread_time()
        _ACTIVE.clock = self

    def check(self, work: int = _SMALL) -> None:
        """Count work, and look at the clock now and then."""
        self._left -= work
        if self._left < self._look_at:
            self.look()

    def look(self) -> None:
        """Raise TemplateRuntimeError after `max_s`, StepTooLongError after `max_step_s`."""
        self.limit(0)
        self._look_at = self._left - _WATCHED
        running_s = time.thread_time() - self._begun_s
        if running_s > self._left_s:
            raise jinja2.TemplateRuntimeError(f"it took more than {self._max_s:g} s")
        if running_s > self._max_step_s:
            raise StepTooLongError

    def limit(self, size: float) -> None:
        """Raise TemplateRuntimeError for a size that is too large, or after too much work."""
        if (size > self._max_size or self._left < 0) and self._given is not None:
            given, self._given, left, self._left = list(self._given.values()), None, self._left, float("inf")
            own = self.size_of(given)
            self._max_size, self._left = MAX_SIZE + 4 * own, left + 1024 * own
        if size > self._max_size or self._left < 0:
            raise jinja2.TemplateRuntimeError("what it makes is too large")

    def size_of(self, value: Any) -> int:
        """Return the size of a value with all in it."""
        kind = value.__class__
        if isinstance(value, str):
            return len(value)
        if kind is int:
            return 8 + int(value.bit_length()) // 3  # its digits
        if kind is range:
            return 8 * len(value)
        if kind not in _CONTAINERS:
            return 8
        known = self._sizes.get(id(value))
        if known is None:
            size = (64 if kind is tuple else 8) * len(value)
            for part in [*value, *value.values()] if kind is dict else value:
                size += len(part) if part.__class__ is str else self.size_of(part)
            known = self._sizes[id(value)] = value, size
            self._left -= 64 * len(value)
        return known[1]

    def taken(self, value: Any) -> Any:
        """Return a part of a value that was measured, or another order or view of it."""
        if isinstance(value, str):
            return self.made(value)
        self.check(_COMPARED + 64 * len(value))
        return value

    def made(self, value: Any) -> Any:
        """Return what was made. Raises TemplateRuntimeError if it is too large."""
        kind = value.__class__
        if kind is str:
            if len(value) > _SMALL:
                self.limit(len(value))
                self.check(4 * len(value))
            return value
        if kind is GeneratorType:
            return self._checked(value)
        if kind is int:
            if value.bit_length() > _MAX_BITS:
                raise jinja2.TemplateRuntimeError("a number is too large")
        elif kind is not bool:
            self.limit(self.size_of(value))
        self.check(_COMPARED)
        return value

    def _checked(self, items: Iterable[Any]) -> Generator[Any]:
        for item in items:
            self.check()
            yield item


class _Active(threading.local):
    clock: RenderClock
    """The clock of the thread's rendering."""


_ACTIVE: Final = _Active()


def _size_of_letters(clock: RenderClock, value: Any, *_: Any, **__: Any) -> int:
    return 8 * len(value) if isinstance(value, str) else 0


def _size_of_pattern(clock: RenderClock, pattern: str, *args: Any, **kwargs: Any) -> float:
    if _WIDE.search(pattern):
        raise jinja2.TemplateRuntimeError("a width is too large")
    return len(pattern) + (pattern.count("%") + pattern.count("{")) * clock.size_of([*args, kwargs])


def _size_of_text(clock: RenderClock, text: Any, old: Any, new: Any, *_: Any, **__: Any) -> float:
    return len(str(text)) + str(text).count(str(old)) * len(str(new))


def _size_of_indents(clock: RenderClock, value: Any, ascii: Any = False, indent: Any = None, *_: Any, **__: Any) -> int:
    width, size, parts = indent if isinstance(indent, int) else len(indent or ""), 0, [value]
    for depth in itertools.count(1):
        inner: list[Any] = [each for each in parts if each.__class__ in _CONTAINERS] if width else []
        if not inner:
            break
        parts = [part for each in inner for part in (each.values() if isinstance(each, dict) else each)]
        size += len(parts) * depth * width
    return size


_SIZES: Final[Mapping[str, Callable[..., float]]] = {
    **dict.fromkeys(("list", "sort", "unique", "min", "max"), _size_of_letters),
    "format": _size_of_pattern,
    "replace": _size_of_text,
    "join": lambda clock, items, d="", attribute=None: clock.size_of(items) + len(items) * len(str(d)),
    "indent": lambda clock, s, width=4, *_, **__: s.count("\n") * (width if isinstance(width, int) else len(width)),
    "tojson": _size_of_indents,
    "round": lambda clock, value, precision=0, method="": abs(precision) * MAX_SIZE // _MAX_BITS,
}
"""Bounds of what filters and methods make that can make far more than they get."""


class _CodeGenerator(CodeGenerator):
    def visit(self, node: jinja2.nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Measure what literals and slices make, and check the clock after comparisons."""
        plain = (jinja2.nodes.Const, jinja2.nodes.List, jinja2.nodes.Tuple)
        match node:
            case jinja2.nodes.Const(value=list() | tuple() | dict() as items):
                checked = "made" if len(items) > 16 else ""
            case jinja2.nodes.List() | jinja2.nodes.Tuple():
                short = len(node.items) <= 16 and all(isinstance(item, jinja2.nodes.Const) for item in node.items)
                checked = "" if short or getattr(node, "ctx", "load") != "load" else "made"
            case jinja2.nodes.Compare():
                checked = "" if all(isinstance(operand.expr, plain) for operand in node.ops) else "compared"
            case jinja2.nodes.Test():
                checked = "compared" if node.args else ""
            case jinja2.nodes.Getitem():
                checked = "taken" if isinstance(node.arg, jinja2.nodes.Slice) else ""
            case _:
                checked = "made" if isinstance(node, jinja2.nodes.Dict) else ""
        if checked:
            self.write(f"environment.{checked}(")
        super().visit(node, *args, **kwargs)
        if checked:
            self.write(")")

    def _output_child_pre(self, node: jinja2.nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("(written if (written := ")

    def _output_child_post(self, node: jinja2.nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(").__class__ is str else environment.written(written))")

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
        RenderClock().begin({})  # for constants
        self.filters["tojson"] = _to_json
        for name in _NO_FILTERS:
            del self.filters[name]
        self.filters |= {name: _measured(name, each) for name, each in self.filters.items() if name not in _CHEAP}
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern[:_SMALL])

    def made(self, value: Any) -> Any:
        return _ACTIVE.clock.made(value)

    def taken(self, value: Any) -> Any:
        return _ACTIVE.clock.taken(value)

    def compared(self, value: Any) -> Any:
        _ACTIVE.clock.check(_COMPARED)
        return value

    def written(self, value: Any) -> Any:
        return value if isinstance(value, str) else self.made(str(value))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _NO_METHODS and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Raise TemplateRuntimeError for a result that is too large."""
        if left.__class__ is str and right.__class__ is str and len(left) + len(right) <= _SMALL and operator == "+":
            return left + right
        clock = _ACTIVE.clock
        if operator == "*":
            for sized, number in ((left, right), (right, left)):
                if isinstance(number, int) and not isinstance(sized, int):
                    clock.limit(clock.size_of(sized) * number)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            clock.limit(left.bit_length() * abs(right) * MAX_SIZE // _MAX_BITS)
        elif operator == "%" and isinstance(left, str):
            clock.limit(_size_of_pattern(clock, left, right))
        return clock.made(super().call_binop(context, operator, left, right))

    def concat(self, parts: Iterable[str]) -> str:
        """Return the text of `~`, a macro or a block. Raises TemplateRuntimeError."""
        parts = list(parts)
        if (size := sum(map(len, parts))) > _SMALL:
            _ACTIVE.clock.limit(size)
            _ACTIVE.clock.check(4 * size)
        return "".join(parts)

    def concatenated(self, values: list[Any]) -> str:
        return self.concat(map(self.written, values))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a macro or a function."""
        clock = _ACTIVE.clock
        clock.check()
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(owner, str):
            if (name := function.__name__) == "join":
                args = (list(*args),)
                clock.limit(_SIZES[name](clock, *args, owner))
            elif name in _SIZES:
                clock.limit(_SIZES[name](clock, owner, *args, **kwargs))
            clock.check(len(owner))
        value = super().call(context, function, *args, **kwargs)
        if owner.__class__ is not dict:
            return clock.made(value)
        clock.check(len(owner))
        return value

    def check(self, work: int) -> bool:
        """Check the clock of the rendering, and return True."""
        _ACTIVE.clock.check(work)
        return True

    def bounded(self, tree: jinja2.nodes.Template) -> jinja2.Template:
        """Compile a template whose loops, macros and blocks check the clock."""
        nodes = jinja2.nodes
        for part in [*tree.find_all(nodes.Stmt)]:
            if isinstance(part, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block):
                work = _SMALL + 8 * sum(1 for _ in part.find_all(nodes.Node))
                check = nodes.EnvironmentAttribute(f"check({work})")  # compiled to `environment.check(work)`
                part.body.insert(0, nodes.ExprStmt(check).set_lineno(part.lineno))
                if isinstance(part, nodes.For):
                    part.test = part.test and nodes.And(check, part.test)
        template = self.from_string(tree)
        template.globals = dict(template.globals)  # renderings copy it: a plain dict is quick to copy
        return template


def _measured(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that measures what it makes."""
    at = 0 if getattr(function, "jinja_pass_arg", None) is None else 1
    size_of, is_part = _SIZES.get(name), name in ("dictsort", "list", "sort")

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        clock = _ACTIVE.clock
        if size_of is not None:
            if isinstance(args[at], GeneratorType):
                args = (*args[:at], list(args[at]), *args[at + 1 :])
            clock.limit(size_of(clock, *args[at:], **kwargs))
        made, value = function(*args, **kwargs), args[at]
        if value.__class__ is not str:
            clock.look()
        else:
            clock.check(_SMALL + 8 * len(value))
            if made.__class__ is str and len(made) <= len(value):
                return made
        return clock.taken(made) if is_part and value.__class__ in _CONTAINERS else clock.made(made)

    return run
