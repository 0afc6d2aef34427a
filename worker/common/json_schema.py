"""The places in a JSON Schema that hold further schemas.

Source: JSON Schema 2020-12, and its earlier drafts, https://json-schema.org/specification
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

Path = tuple[str, ...]

_ONE: Final = frozenset(
    {
        *("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not"),
        *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
    }
)
_MANY: Final = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_NAMED: Final = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
MAX_FACTOR: Final = 10**9
"""The limit for `multipleOf`."""


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


def at_pointer(schema: Any, tokens: Path) -> Any:
    """Return what stands at a path. Raises LookupError or ValueError."""
    for token in tokens:
        if isinstance(schema, list):
            schema = schema[int(token)]
        elif isinstance(schema, dict):
            schema = schema[token]
        else:
            raise LookupError(token)
    return schema


def pointer(tokens: Path) -> str:
    """Write a path as a reference's fragment, by RFC 6901."""
    return "#" + "".join("/" + _escaped(token) for token in tokens)


def _escaped(token: str) -> str:
    plain = token.replace("~", "~0").replace("/", "~1")
    return "".join(char if (char.isascii() and char.isalnum()) or char in "_-.~$" else _percent(char) for char in plain)


def _percent(char: str) -> str:
    return "".join(f"%{byte:02X}" for byte in char.encode())


def check_factors(schema: Any) -> None:
    """Raise ValueError for a `multipleOf` for which a compiler would take all memory."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            factor = node.get("multipleOf")
            if isinstance(factor, int | float) and abs(factor) > MAX_FACTOR:
                raise ValueError(f"multipleOf takes at most {MAX_FACTOR}")
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
