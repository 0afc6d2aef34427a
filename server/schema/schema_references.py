"""The references of a JSON Schema: `#`, pointers, anchors and identifiers, by the base that each stands in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from server.event_loop import Steps
from worker.common.json_schema import Path, at_pointer, children


@dataclass(slots=True)
class References:
    """The targets of a schema's references, owned by the rewriting function."""

    schema: dict[str, Any]
    bases: dict[int, str] = field(default_factory=dict)
    """The base of each schema, by its identity."""
    indexed: list[dict[str, Any]] = field(default_factory=list)
    resources: dict[str, Path] = field(default_factory=dict)
    anchors: dict[tuple[str, str], Path] = field(default_factory=dict)
    moved: dict[Path, Path] = field(default_factory=dict)
    """The new paths of keywords that were renamed."""

    def add(self, path: Path, node: dict[str, Any], base: str) -> Steps[None]:
        """Index a schema and all that it holds."""
        waiting = [(path, node, base)]
        while waiting:
            if len(self.indexed) % 256 == 255:
                yield
            path, node, base = waiting.pop()
            if id(node) in self.bases:
                continue
            given = node.get("$id", node.get("id"))
            if isinstance(given, str):
                if given.startswith("#"):
                    self.anchors.setdefault((base, given[1:]), path)
                else:
                    base = urldefrag(_joined(base, given))[0]
                    self.resources.setdefault(base, path)
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(name := node.get(key), str):
                    self.anchors.setdefault((base, name), path)
            self.bases[id(node)] = base
            self.indexed.append(node)
            waiting += [((*path, *step), child, base) for step, child in children(node) if isinstance(child, dict)]

    def target(self, node: dict[str, Any], reference: str) -> Path | None:
        """Return the path that a reference of this schema points to; None if there is none."""
        base = self.bases[id(node)]
        uri, fragment = urldefrag(_joined(base, reference))
        if reference.startswith("#"):
            uri = base
        resource = () if uri == "" else self.resources.get(uri)
        if resource is None:
            return None
        fragment = unquote(fragment)
        path: Path | None = resource
        if fragment.startswith("/"):
            tokens = fragment[1:].split("/")
            path = (*resource, *[token.replace("~1", "/").replace("~0", "~") for token in tokens])
        elif fragment:
            path = self.anchors.get((uri, fragment))
        try:
            found = None if path is None else at_pointer(self.schema, self.current(path))
        except (LookupError, ValueError):
            return None
        return path if isinstance(found, dict | bool) else None

    def current(self, path: Path) -> Path:
        """Return where a path leads after keywords were renamed."""
        return tuple(self.moved.get(path[: i + 1], path)[i] for i in range(len(path)))


def _joined(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError:  # no URI at all
        return reference
