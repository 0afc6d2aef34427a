"""The white space that a grammar allows between the tokens of JSON: a space, or a new line with its indentation.

Without a bound, some models write spaces up to their length limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_INDENTING: Final = frozenset({"items", "prefixItems", "properties", "additionalProperties", "patternProperties"})
MAX_DEPTH: Final = 8
OPEN_DEPTH: Final = 4
"""The depth of a schema that sets none: it refers to itself, or allows any object."""


def whitespace_options(schema: object, *, compact: bool = False) -> dict[str, Any]:
    """Return llguidance's options. An indentation has at most two spaces for each level of the schema.

    `compact`: no white space at all.
    """
    if compact:
        return {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
    pattern = rf"\x20|\x0A(\x20\x20){{0,{schema_depth(schema)}}}"
    return {"whitespace_flexible": True, "whitespace_pattern": pattern}


def schema_depth(schema: object) -> int:
    """Return how deeply the objects and arrays of a schema nest, at most MAX_DEPTH."""
    deepest = 0
    waiting = [(schema, 0)]
    while waiting:
        node, depth = waiting.pop()
        if isinstance(node, Mapping):
            is_open = "$ref" in node or (node.get("type") == "object" and "properties" not in node)
            deepest = max(deepest, depth + OPEN_DEPTH if is_open else depth)
            waiting += [(value, depth + (key in _INDENTING)) for key, value in node.items() if depth < MAX_DEPTH]
        elif isinstance(node, list):
            waiting += [(value, depth) for value in node]
        deepest = max(deepest, depth)
    return min(MAX_DEPTH, deepest)
