"""The tables of values in docs/kubernetes/values.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from tools.values.schema import VALUES, WORKER
from tools.values.terms import Schema

MAX_DEFAULT: Final = 40
"""Characters of a default that a row shows."""


def leaves(node: Schema, defaults: Any, path: str) -> Iterator[tuple[str, Any, str]]:
    """Each value that can be set: its path, default and meaning. The timings of a probe are one row."""
    for key, child in node["properties"].items():
        here, default = f"{path}{key}", defaults.get(key)
        if key.endswith("Probe"):
            yield here, default, f"{child['description']} Its timings: {', '.join(child['properties'])}."
        elif "properties" in child and default != {}:
            yield from leaves(child, default, f"{here}.")
        elif "$ref" not in child:
            yield here, default, child["description"]


def table(rows: Iterator[tuple[str, Any, str]]) -> list[str]:
    """Return the lines of a Markdown table. A default too long for a row is left to values.yaml."""
    lines = ["| value | default | meaning |", "| --- | --- | --- |"]
    for path, default, meaning in rows:
        shown = "not set" if default is None else f"`{json.dumps(default)}`"
        lines.append(f"| `{path}` | {shown if len(shown) < MAX_DEFAULT else 'see values.yaml'} | {meaning} |")
    return lines


def tables(defaults: dict[str, Any]) -> str:
    """Every value with its default and what it means."""
    lines = ["### An entry of `models`", "", "| key | meaning |", "| --- | --- |"]
    entry = VALUES["properties"]["models"]["items"]["properties"]
    lines += [f"| `{key}` | {entry[key]['description']} |" for key in ("name", "source")]
    lines += ["| any key of `worker` | As below, for this model only; lists replace, objects are merged. |", ""]
    worker = {"properties": WORKER}
    lines += [
        "### `worker`: the defaults of every model",
        "",
        *table(leaves(worker, defaults["worker"], "worker.")),
        "",
    ]
    lines += ["### Everything else", "", *table(leaves(VALUES, defaults, ""))]
    return "\n".join(lines)


def with_tables(page: str, defaults: dict[str, Any]) -> str:
    """The page with the tables between its marks."""
    begin, end = "<!-- values: begin -->", "<!-- values: end -->"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{tables(defaults)}\n{end}{after}"
