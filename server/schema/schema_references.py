"""The references of a JSON Schema, which the compiler follows: whether each has a target, by the base URI around it."""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import unquote, urldefrag, urljoin

from server.event_loop import TimeSlice
from worker.common.json_schema import Path, children

Node = dict[str, Any]
_ID: Final = re.compile(r"(?:https?://[A-Za-z0-9.-]+/)?(?:[\w-][\w.-]*/)*[\w-][\w.-]*", re.ASCII)
"""The identifiers that references may have. Any other is replaced."""


class References:
    """The targets of a schema's references, by URI and anchor."""

    def __init__(self) -> None:
        self._bases: dict[int, str] = {}
        """The base URI of each schema, by its `id()`."""
        self._targets: dict[str, tuple[Path, Any]] = {}

    async def add(self, path: Path, node: Any, base: str) -> list[tuple[Path, Node]]:
        """Index a schema and all that it holds. Return those that are new, in their order."""
        found: list[tuple[Path, Node]] = []
        waiting, time_slice = [(path, node, base)], TimeSlice()
        while waiting:
            path, node, base = waiting.pop()
            if not isinstance(node, dict) or id(node) in self._bases:
                continue
            if (given := node.get("$id")) is not None:
                known = isinstance(given, str) and _ID.fullmatch(given)
                node["$id"] = base = urljoin(base, given if known else f"{len(self._bases)}/")
                self._targets.setdefault(base, (path, node))
            for key in ("$anchor", "$dynamicAnchor"):
                self._targets.setdefault(f"{base}#{node.get(key)}", (path, node))
            self._bases[id(node)] = base
            found.append((path, node))
            waiting += reversed([((*path, *step), child, base) for step, child in children(node)])
            await time_slice.rest()
        return found

    def target(self, node: Node) -> tuple[Path, Any, str] | None:
        """Return the path, the schema and the base URI that the `$ref` of a node points to; None if there is none."""
        try:
            uri, fragment = urldefrag(urljoin(self._bases[id(node)], node["$ref"]))
        except (LookupError, TypeError, ValueError):  # it has none, or no URI
            return None
        fragment = unquote(fragment)
        is_pointer = fragment.startswith("/")
        path, found = self._targets.get(uri if is_pointer or not fragment else f"{uri}#{fragment}", ((), None))
        for token in fragment[1:].split("/") if is_pointer else ():
            token = token.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(token) if isinstance(found, list) else token]
            except (LookupError, TypeError, ValueError):
                return None
            path = (*path, token)
        return (path, found, uri) if isinstance(found, dict | bool) else None

    def absolute(self, node: Node) -> str:
        """Return the `$ref` of a node that was added, for a compiler that may come to it by another reference."""
        return urljoin(self._bases[id(node)], str(node["$ref"]))

    def resolve(self, option: Any) -> Node:
        """Return an option that was added, or the schema that it refers to; {} if there is none."""
        for _ in range(8):  # references to references: a longer chain is taken as a loop
            if not isinstance(option, dict):
                break
            if "$ref" not in option:
                return option
            target = self.target(option)
            option = None if target is None else target[1]
        return {}
