"""A client's JSON Schema for a grammar: what the compiler lacks is named, and taken out where it would refuse it.

The compiler ignores most of these keywords, but refuses some and misreads others. With `strict: true` such a keyword is
refused, but for the limits of a float's type. Otherwise it is left to the model, and named in a header of the answer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

from server.event_loop import TimeSlice
from server.schema.decoding import invalid
from server.schema.patterns import FORMAT_PATTERNS, enforceable_pattern
from server.schema.schema_references import Node, References
from worker.common.json_schema import Path, is_countable

_IGNORED: Final[dict[str, tuple[Any, ...]]] = {
    "$dynamicRef": (),
    "$recursiveRef": (),
    "contains": (),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "if": (),
    "not": (False, {}, True),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}
"""Keywords that the compiler ignores, with the values that have no effect or are enforced in another way."""
_MAX_EXACT: Final = 2**53  # the compiler reads numbers as floats
_LEAST: Final = 1e-15  # a number as small as a grammar counts
_FLOAT_LIMITS: Final = (3.4028234663852886e38, 1.7976931348623157e308)
"""Largest numbers of 32 and 64 bits. zod writes them as bounds of the type."""
_MAX_SHOWN: Final = 16  # with the next one, keeps the header below the limits of proxies
_MAX_FIELD_CHARS: Final = 120
"""Keeps the header below the limits of proxies."""


@dataclass(frozen=True, slots=True)
class GrammarSchema:
    schema: Node
    relaxed: tuple[str, ...] = ()
    """The fields that are left to the model."""


async def grammar_schema(given: Node, param: str, *, strict: bool, name: str = "format") -> GrammarSchema:
    """Return a schema for a grammar, in slices. `param` names the client's field.

    `name`: its references point into it within a larger schema, in which no other has this name. Raises
    InvalidRequestError with `strict` for an unenforced keyword.
    """
    schema: Node = json.loads(json.dumps(given))
    schema["x-guidance"] = {"lenient": True}  # the compiler ignores what is named here
    schema["$id"] = base = f"http://schema/{name}/"
    references, time_slice, relaxed = References(), TimeSlice(), list[str]()

    def relax(path: Path, node: Node, keyword: str) -> None:
        field = param + "".join(map(field_step, (*path, keyword)))
        if strict and not _is_float_limit(node[keyword]):
            raise invalid(field, "cannot be enforced by a grammar: leave it out, or leave strict out")
        relaxed.append(field)
        if keyword not in _IGNORED and keyword != "oneOf":  # which the compiler takes as anyOf
            del node[keyword]

    nodes = await references.add((), schema, base)
    for path, node in nodes:  # which grows
        for keyword in _unenforced(node, references):
            relax(path, node, keyword)
        node.pop("$schema", None)
        if (target := references.target(node)) is not None:
            nodes += await references.add(*target)
        await time_slice.rest()
    refers = False
    for path, node in nodes:
        if isinstance(node.get("$ref"), str):
            refers = True
            if references.target(node) is None:
                relax(path, node, "$ref")
            else:
                node["$ref"] = references.absolute(node)
        await time_slice.rest()
    if not refers:
        del schema["$id"]
    return GrammarSchema(schema, tuple(relaxed))


def relaxed_header(fields: tuple[str, ...]) -> tuple[bytes, bytes]:
    """Return the header that names the fields, the first ones of many."""
    shown = [
        field if len(field) <= _MAX_FIELD_CHARS else f"...{field[-_MAX_FIELD_CHARS:]}" for field in fields[:_MAX_SHOWN]
    ]
    if len(fields) > len(shown):
        shown.append(f"and {len(fields) - len(shown)} more")
    return b"x-headstart-relaxed", ", ".join(shown).encode()


def _unenforced(node: Node, references: References) -> Iterator[str]:
    """Yield the keywords that a grammar cannot enforce. Write others so that it does."""
    if node.get("not", False) in ({}, True):
        node["enum"] = []
    pattern = FORMAT_PATTERNS.get(str(node.get("format")))
    if pattern is not None and isinstance(all_of := node.setdefault("allOf", []), list):
        all_of.append({"pattern": pattern})
    for keyword, neutral in _IGNORED.items():
        is_effective = keyword != "if" or "then" in node or "else" in node
        if keyword in node and node[keyword] not in neutral and is_effective:
            yield keyword
    patterns = node.get("patternProperties")
    if isinstance(patterns, dict) and (len(patterns) > 1 or None in map(enforceable_pattern, patterns)):
        yield "patternProperties"
        if node.get("additionalProperties", True) not in (True, {}):
            yield "additionalProperties"
    yield from _unenforced_counts(node)
    if isinstance(pattern := node.get("pattern"), str):
        if (same := enforceable_pattern(pattern)) is None:
            yield "pattern"
        else:
            node["pattern"] = same
    yield from _unenforced_numbers(node)
    if isinstance(options := node.get("oneOf"), list) and not _are_disjoint(node, options, references):
        yield "oneOf"


def _unenforced_counts(node: Node) -> Iterator[str]:
    """Yield bounds on the number of an object's properties, where some of the named ones may be absent."""
    if node.get("minProperties") == 0:
        del node["minProperties"]
    counts = [keyword for keyword in ("minProperties", "maxProperties") if keyword in node]
    if not (_properties(node).keys() <= _required(node)) or node.get("patternProperties"):
        yield from counts


def _unenforced_numbers(node: Node) -> Iterator[str]:
    """Yield bounds, factors and values that take more digits than a grammar counts.

    Move an excluded bound by the least step: the compiler takes it where another bound is in the same unit.
    """
    is_integer = node.get("type") == "integer"
    for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        bound = node.get(keyword)
        if not isinstance(bound, int | float) or isinstance(bound, bool):
            continue
        if not abs(bound) <= _MAX_EXACT:  # or it is NaN
            if not (is_integer and keyword == "maximum" and bound > 0 and node.get("minimum", -1) == 0):
                yield keyword
        elif keyword.startswith("exclusive") and not is_integer and bound == int(bound):
            sign = 1 if keyword == "exclusiveMinimum" else -1
            node[keyword] = math.nextafter(bound, sign * math.inf) if bound else sign * _LEAST
    if not is_countable(node.get("multipleOf")):
        yield "multipleOf"
    for keyword in ("const", "enum"):
        if keyword in node and _is_rounded(node[keyword]):
            yield keyword


def _is_rounded(value: object) -> bool:
    """Return whether a value holds an integer that a float may not be."""
    if isinstance(value, dict | list):
        return any(map(_is_rounded, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and abs(value) > _MAX_EXACT


def _is_float_limit(bound: object) -> bool:
    return isinstance(bound, int | float) and abs(bound) in _FLOAT_LIMITS


def _are_disjoint(node: Node, options: list[Any], references: References) -> bool:
    """Return whether each value fits at most one of the options, by its type or by distinct values.

    Takes linear time, as clients write thousands of options.
    """
    if isinstance(discriminator := node.get("discriminator"), dict) and "propertyName" in discriminator:
        return True
    groups: dict[frozenset[str], list[Node]] = {}
    for option in options:
        kind = references.resolve(option)
        groups.setdefault(frozenset(_types(kind)), []).append(kind)
    if len(groups) > 1 and (frozenset() in groups or not _share_nothing(groups)):
        return False
    return all(len(group) == 1 or _have_own_values(group, references) for group in groups.values())


def _have_own_values(options: list[Node], references: References) -> bool:
    """Return whether the values of the options, or of a property that all require, share nothing."""
    if _share_nothing(list(map(_values, options))):
        return True
    if any(_types(option) != {"object"} for option in options):
        return False
    return any(
        _share_nothing([_values(references.resolve(_properties(option).get(name))) for option in options])
        for name in frozenset.intersection(*map(_required, options))
    )


def _share_nothing(sets: Collection[frozenset[str] | None]) -> bool:
    """Return whether no two sets have a common member; False if one is not known."""
    known = [each for each in sets if each is not None]
    return len(known) == len(sets) and sum(map(len, known)) == len(frozenset().union(*known))


def _properties(node: Node) -> Node:
    given = node.get("properties")
    return given if isinstance(given, dict) else {}


def _required(node: Node) -> frozenset[str]:
    given = node.get("required")
    return frozenset(name for name in given if isinstance(name, str)) if isinstance(given, list) else frozenset()


def _types(node: Node) -> set[str]:
    given = node.get("type", [])
    types = {name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)}
    return types - {"integer"} | {"number"} if "integer" in types else types


def _values(node: Node) -> frozenset[str] | None:
    """Return the values that a schema lists, as JSON; None if it lists none."""
    if "const" in node:
        return frozenset((_written(node["const"]),))
    return frozenset(map(_written, node["enum"])) if isinstance(node.get("enum"), list) else None


def _written(value: Any) -> str:
    """Write a value so that equal ones are the same text: 1.0 is 1."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def field_step(step: str) -> str:
    """Write a step of a path in a schema as a part of a field's name."""
    if step.isascii() and step.replace("$", "_").replace("-", "_").isidentifier():
        return f".{step[:64]}"
    return f"[{step[:64] if step.isascii() and step.isdecimal() else json.dumps(step[:64])}]"
