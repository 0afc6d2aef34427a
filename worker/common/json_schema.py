"""The parts of a JSON Schema that contain further schemas, and the options of its compiler.

Source: JSON Schema 2020-12, and its earlier drafts, https://json-schema.org/specification
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from math import isfinite
from typing import Any, Final
from urllib.parse import quote

Path = tuple[str, ...]

_ONE: Final = frozenset(
    {
        *("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not"),
        *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
    }
)
_MANY: Final = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_NAMED: Final = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
_EMBEDDED: Final = re.compile(r"%json\s*")
MAX_INDENTED_LEVELS: Final = 8
"""The white space of one token of a usual vocabulary: deeper lines are indented no further."""
_MAX_FACTOR_DIGITS: Final = 5
"""The limit for a factor's digits without zeros at the ends. One more takes a second, seven may take all memory."""
_MAX_FACTOR_ZEROS: Final = 9
"""The compiler counts factors in 32 bits."""


def children(schema: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Yield the schemas that a schema holds itself, each after its path. Data, as in `const`, is no schema."""
    for key, value in schema.items():
        if isinstance(value, dict):
            if key in _NAMED:
                yield from (((key, name), child) for name, child in value.items())
            elif key in _ONE:
                yield (key,), value
        elif isinstance(value, list) and key in _MANY:
            yield from (((key, str(index)), child) for index, child in enumerate(value))


def pointer(tokens: Path) -> str:
    """Write a path as a reference's fragment, by RFC 6901."""
    return "#" + "".join("/" + quote(token.replace("~", "~0").replace("/", "~1"), safe="$") for token in tokens)


def compiler_options(*, compact: bool = False) -> dict[str, Any]:
    """Return llguidance's options: a space between tokens of JSON, or a new line with its indentation.

    Without a bound, some models write spaces up to their length limit. `compact`: no white space at all.
    """
    if compact:
        return {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":", "coerce_one_of": True}
    pattern = rf"\x20|\x0A(\x20\x20){{0,{MAX_INDENTED_LEVELS}}}"
    return {"whitespace_flexible": True, "whitespace_pattern": pattern, "coerce_one_of": True}


def is_countable(factor: Any) -> bool:
    """Return whether a compiler can hold values to this `multipleOf`."""
    if not isinstance(factor, int | float) or isinstance(factor, bool) or not factor or not isfinite(factor):
        return True  # an error that the compiler names
    number = Decimal(str(factor)).normalize()
    return len(number.as_tuple().digits) <= _MAX_FACTOR_DIGITS and abs(number.adjusted()) < _MAX_FACTOR_ZEROS


def check_factors(schema: Any) -> None:
    """Raise ValueError for a `multipleOf` for which a compiler would take all memory."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if not is_countable(node.get("multipleOf")):
                raise ValueError(f"multipleOf takes at most {_MAX_FACTOR_DIGITS} digits")
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def check_embedded(lark: str) -> None:
    """Check the factors in a client's own grammar as `check_factors` does."""
    for found in _EMBEDDED.finditer(lark):
        with suppress(json.JSONDecodeError):  # which the compiler names
            check_factors(json.JSONDecoder().raw_decode(lark, found.end())[0])
