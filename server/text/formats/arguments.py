"""Read the arguments of a call that are not written as JSON, and pass them on as JSON.

tags       <parameter=city>Köln</parameter><parameter=days>3</parameter>      the tool's schema gives the types

All of them give {"city": "Köln", "days": ...}. What is cut off gives the beginning of it.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from server.text.formats.base import Checking, TextReader

_KEY: Final = re.compile(r"""\s*(["']?)(.*?)\1\s*""", re.DOTALL)
_BOOLEANS: Final = {"1": "true", "0": "false"}
_NAMES: Final = {"true": True, "false": False, "null": None}
_TYPES: Final[dict[str, Callable[[Any], bool]]] = {
    "null": lambda value: value is None,
    "integer": lambda value: type(value) is int,
    "number": lambda value: type(value) in (int, float),
    "boolean": lambda value: type(value) is bool,
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
}
_ALIASES: Final = {
    **{"str": "string", "text": "string", "int": "integer", "long": "integer", "float": "number", "double": "number"},
    **{"bool": "boolean", "dict": "object", "list": "array", "tuple": "array"},
}


@dataclass(frozen=True, slots=True)
class Tags:
    """The texts around the key and the value of an argument."""

    key: tuple[str, str]
    value: tuple[str, str]
    trims: bool = False
    """A line break at either end of a value is not part of it. A key may come without the end before it."""
    line: str = ""
    """The text that a grammar writes after each argument, and before a value with a beginning of its own."""

    @property
    def opening(self) -> str:
        return self.key[0].rstrip("\"'")

    def read(self, reader: TextReader, name: str, ends: Sequence[str]) -> Checking:
        """Read arguments up to one of `ends`, which is left. Return False if the text ends before."""
        separator, emit = "{", partial(reader.emit, "arguments")
        opening, schema = self.opening, reader.schemas.get(name)
        while True:
            space = yield from reader.space()
            if not (yield from reader.starts((opening,))):
                is_end = bool((yield from reader.starts(ends)))
                is_cut = not is_end and reader.ended and any(mark.startswith(reader.text) for mark in (opening, *ends))
                if not is_cut:  # other text is no argument
                    emit("{}" if separator == "{" else "}")
                reader.text = "" if is_cut else reader.text if is_end else space + reader.text
                return is_end
            reader.text = reader.text[len(opening) :]
            head: list[str] = []
            closed = yield from reader.until((self.key[1].lstrip("\"'"),), head.append)
            match = _KEY.fullmatch("".join(head))
            assert match is not None, "every part of it may be empty"
            emit(f"{separator}{_quoted(match[2])}" + (": " if closed else ""))
            separator = ", "
            if not closed or not (yield from self._value(reader, types_of(schema, match[2]), ends)):
                return False

    def _value(self, reader: TextReader, types: frozenset[str], ends: Sequence[str]) -> Checking:
        if self.value[0]:
            yield from reader.begins((self.value[0],))
        breaks, keys = (("\n", ""), (self.opening,)) if self.trims else (("",), ())
        if self.trims and (yield from reader.starts(("\n",))):
            reader.text = reader.text[1:]
        after = [line + end for line in breaks for end in (self.value[1], *keys, ends[0])]
        emit, parts = partial(reader.emit, "arguments"), list[str]()
        if types == {"string"}:
            emit('"')
            found = yield from reader.before(after, lambda part: emit(_quoted(part)[1:-1]))
            emit('"' if found else "")
        else:
            found = yield from reader.before(after, parts.append)
            emit(typed("".join(parts), types) if found else "".join(parts).lstrip())
        reader.text = reader.text[len(found) :] if found.endswith(self.value[1]) else reader.text
        return bool(found)


def types_of(schema: Any, key: str) -> frozenset[str]:
    """Return the JSON types that an argument may have; a string where nothing is known."""
    if not isinstance(schema, Mapping):
        return frozenset({"string"})
    properties = schema.get("properties")
    own = properties.get(key) if isinstance(properties, Mapping) else None
    other = schema.get("additionalProperties") if own is None else own
    return frozenset(_schema_types(other, schema, 8)) or frozenset({"string"})


def _schema_types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return set()
    given = schema.get("type")
    names = given if isinstance(given, list) else [given]
    found = {_ALIASES.get(name.lower(), name.lower()) for name in names if isinstance(name, str)}
    if not found:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        for value in values if isinstance(values, list) else ():
            found |= {next((name for name, fits in _TYPES.items() if fits(value)), "string")}
    lists = [schema.get(key) for key in ("anyOf", "oneOf", "allOf")]
    for option in [option for options in lists if isinstance(options, list) for option in options]:
        found |= _schema_types(option, root, depth - 1)
    return found | _schema_types(referred(schema, root), root, depth - 1)


def referred(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """Return what a schema refers to within the root; None if it does not."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    target: Any = root
    for step in filter(None, reference[1:].split("/")):
        target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
    return target


def typed(text: str, types: frozenset[str]) -> str:
    """Return a text as JSON of one of some types. It is a string only if it is nothing else."""
    bare = text.strip()
    value = _parsed(bare)
    if value is not _NOTHING and any(fits(value) for name, fits in _TYPES.items() if name in types):
        return json.dumps(value, ensure_ascii=False)
    if "boolean" in types and (word := _BOOLEANS.get(bare.lower(), bare.lower())) in ("true", "false"):
        return word
    if "null" in types and bare.lower() in ("null", "none"):
        return "null"
    if "string" in types or value is _NOTHING:
        return _quoted(text)
    if "integer" in types and isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value, ensure_ascii=False)


_NOTHING: Final = object()


def _parsed(text: str) -> Any:
    """Return the value of JSON, or of a Python literal. Numbers are finite."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        try:
            value = literal(ast.parse(text.replace("\n", "\\n") if text[:1] in "\"'" else text, mode="eval").body)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return _NOTHING
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def literal(node: ast.expr) -> Any:
    """Return the value of a Python literal. Raises ValueError for another one than JSON has."""
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            text = str(value)  # raises ValueError for too many digits
            return value if not isinstance(value, float) else _finite(text)
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [literal(key) if key is not None else _refuse("**") for key in keys]
            return {str(name): literal(value) for name, value in zip(names, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float()) as number):
            return -literal(number)
    raise ValueError(type(node).__name__)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
