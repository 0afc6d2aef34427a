"""The texts in a JSON value."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any


def texts(value: Any, names: Collection[str] | None = None, name: str = "") -> Iterator[str]:
    """Yield all texts in the order of the value, or those of fields with one of these names."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from texts(item, names, key)
    elif isinstance(value, list):
        for item in value:
            yield from texts(item, names, name)
    elif isinstance(value, str) and (names is None or name in names):
        yield value
