"""A client's JSON Schema for a grammar: references become pointers, and what the compiler lacks is named.

The compiler itself ignores most of these keywords, but refuses some and misreads others. It reads relative references
against the wrong schema. With `strict: true` such a keyword is refused, but for the limits of a float's type. Otherwise
it is left to the model, and named in a header of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

from server.event_loop import TimeSlice
from server.schema.decoding import invalid
from server.schema.patterns import FORMAT_PATTERNS, enforceable_pattern
from server.schema.schema_references import ASIDE, Node, References
from worker.common.json_schema import Path, is_countable, pointer

_IGNORED: Final[dict[str, tuple[Any, ...]]] = {
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
_LOCAL: Final = frozenset({"$anchor", "$dynamicAnchor", "$id", "$recursiveAnchor", "$schema", "$vocabulary", "id"})
"""Keywords for the reading of references. They are dropped, as all references become pointers."""
_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
_MAX_BOUND: Final = 10**16  # the compiler writes no range of larger floats
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


async def grammar_schema(given: Node, param: str, *, strict: bool, at: Path = ()) -> GrammarSchema:
    """Return a schema for a grammar that has it at a path, in slices. `param` names the client's field.

    Raises InvalidRequestError with `strict` for an unenforced keyword.
    """
    schema: Node = json.loads(json.dumps(given))
    schema["x-guidance"] = {"lenient": True}  # the compiler ignores what is named here
    references, time_slice = References(schema), TimeSlice()
    nodes = await references.add((), schema)
    links: list[tuple[Node, str]] = []
    relaxed: list[str] = []
    for path, node in nodes:  # which grows
        for keyword in _unenforced(node, references):
            field = _field_name(param, (*path, keyword))
            if strict and not _is_float_limit(node[keyword]):
                why = "cannot be enforced by a grammar: leave it out, or leave strict out"
                raise invalid(field, why)
            relaxed.append(field)
            if keyword not in _IGNORED and keyword != "oneOf":  # which the compiler takes as anyOf
                node[ASIDE + keyword] = node.pop(keyword)
        for keyword in _REFERENCES:
            if isinstance(reference := node.get(keyword), str) and (target := references.find(node, reference)):
                links.append((node, keyword))
                nodes += await references.add(*target)
        await time_slice.rest()
    for node, keyword in links:
        target = references.find(node, node.pop(keyword))
        assert target is not None
        node["$ref"] = pointer((*at, *target[0]))
        await time_slice.rest()
    for _, node in nodes:
        for keyword in _LOCAL & node.keys():
            del node[keyword]
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
    for keyword in _REFERENCES:
        is_second = keyword != "$ref" and "$ref" in node
        if isinstance(reference := node.get(keyword), str) and (is_second or not references.find(node, reference)):
            yield keyword


def _unenforced_counts(node: Node) -> Iterator[str]:
    """Yield bounds on the number of an object's properties, where some of the named ones may be absent."""
    if node.get("minProperties") == 0:
        del node["minProperties"]
    counts = [keyword for keyword in ("minProperties", "maxProperties") if keyword in node]
    properties = node.get("properties", {})
    is_open = isinstance(properties, dict) and not (properties.keys() <= _required(node))
    if is_open or node.get("patternProperties"):
        yield from counts


def _unenforced_numbers(node: Node) -> Iterator[str]:
    """Yield bounds and factors that take more digits than a grammar counts."""
    is_integer = node.get("type") == "integer"
    for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        bound = node.get(keyword)
        if not isinstance(bound, int | float) or isinstance(bound, bool) or abs(bound) <= _MAX_BOUND:
            continue
        if is_integer and keyword.endswith("aximum") and bound > 0 and node.get("minimum", -1) == 0:
            continue
        yield keyword
    if not is_countable(node.get("multipleOf")):
        yield "multipleOf"


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
        kind = references.resolve(node, option)
        groups.setdefault(frozenset(_types(kind)), []).append(kind)
    if len(groups) > 1 and (frozenset() in groups or not _share_nothing(groups)):
        return False
    return all(len(group) == 1 or _have_own_values(group, references) for group in groups.values())


def _have_own_values(options: list[Node], references: References) -> bool:
    """Return whether the values of the options, or of a property that all require, share nothing."""
    values = [_values(option) for option in options]
    if None not in values:
        return _share_nothing([each for each in values if each is not None])
    if any(_types(option) != {"object"} for option in options):
        return False
    for name in frozenset.intersection(*map(_required, options)):
        value_sets = []
        for option in options:
            properties = option.get("properties")
            if not isinstance(properties, dict) or name not in properties:
                break
            if (found := _values(references.resolve(option, properties[name]))) is None:
                break
            value_sets.append(found)
        else:
            if _share_nothing(value_sets):
                return True
    return False


def _share_nothing(sets: Collection[frozenset[str]]) -> bool:
    return sum(map(len, sets)) == len(frozenset().union(*sets))


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


def _field_name(param: str, path: Path) -> str:
    """Write a path in a schema as a field of the request."""
    return param + "".join(map(_step, path))


def _step(step: str) -> str:
    if step.isascii() and step.replace("$", "_").replace("-", "_").isidentifier():
        return f".{step[:64]}"
    return f"[{step[:64] if step.isascii() and step.isdecimal() else json.dumps(step[:64])}]"
