"""The references of a JSON Schema: `#`, pointers, anchors and identifiers, each resolved by the base URI around it."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from server.event_loop import TimeSlice
from worker.common.json_schema import Path, children

Node = dict[str, Any]
ASIDE = "x-"
"""Prefix of a keyword that the grammar ignores. It stays under this name, as references may point into it."""


class References:
    """The targets of a schema's references, owned by the rewriting function."""

    def __init__(self, schema: Node) -> None:
        self._schema = schema
        self._bases: dict[int, str] = {}
        """The base URI of each schema, by its `id()`."""
        self._targets: dict[str, Path] = {"": ()}
        """The path of each identifier and anchor."""
        self._id = "id" if "/draft-04/" in str(schema.get("$schema")) else "$id"

    async def add(self, path: Path, node: Any, base: str = "") -> list[tuple[Path, Node]]:
        """Index a schema and all that it holds. Return those that are new, in their order."""
        found: list[tuple[Path, Node]] = []
        waiting, time_slice = [(path, node, base)], TimeSlice()
        while waiting:
            path, node, base = waiting.pop()
            if not isinstance(node, dict) or id(node) in self._bases:
                continue
            if isinstance(given := node.get(self._id), str):
                uri = base + given if given.startswith("#") else _joined(base, given).removesuffix("#")
                self._targets.setdefault(uri, path)
                base = urldefrag(uri)[0]
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(name := node.get(key), str):
                    self._targets.setdefault(f"{base}#{name}", path)
            self._bases[id(node)] = base
            found.append((path, node))
            waiting += reversed([((*path, *step), child, base) for step, child in children(node)])
            await time_slice.rest()
        return found

    def find(self, node: Node, reference: str) -> tuple[Path, Any] | None:
        """Return the path and the schema that a reference in `node` points to; None if there is none."""
        base = self._bases[id(node)]
        uri, fragment = urldefrag(_joined(base, reference))
        if reference.startswith("#"):
            uri = base
        tokens: list[str] = []
        if fragment.startswith("/"):
            tokens = [token.replace("~1", "/").replace("~0", "~") for token in unquote(fragment)[1:].split("/")]
        elif fragment:
            uri = f"{uri}#{unquote(fragment)}"
        if (path := self._targets.get(uri)) is None:
            return None
        found: Any = self._schema
        path_now: list[str] = []
        for token in (*path, *tokens):
            if isinstance(found, dict) and token not in found:
                token = ASIDE + token
            try:
                found = found[int(token) if isinstance(found, list) else token]
            except (LookupError, TypeError, ValueError):
                return None
            path_now.append(token)
        return (tuple(path_now), found) if isinstance(found, dict | bool) else None

    def resolve(self, node: Node, option: Any) -> Node:
        """Return an option of `node`, or the schema that it refers to; {} if there is none."""
        for _ in range(8):  # references to references: a longer chain is taken as a loop
            if not isinstance(option, dict):
                break
            if not isinstance(reference := option.get("$ref"), str):
                return option
            self._bases.setdefault(id(option), self._bases[id(node)])
            target = self.find(option, reference)
            option = None if target is None else target[1]
        return {}


def _joined(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError:  # it is no URI
        return reference
