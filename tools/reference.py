"""Write the pages that are lists of the code: the refused fields, and the metrics."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from prometheus_client.metrics_core import Metric

from server.api.embeddings import EMBEDDING
from server.metrics import GatewayMetrics
from server.schema.field_table import IGNORED, FieldRefusal
from server.schema.messages import MESSAGES
from server.schema.requests import CHAT, COMPLETION, RESPONSES
from server.usage.totals import UsageTotals
from worker.contracts.metrics import WorkerMetrics

ROOT: Final = Path(__file__).parent.parent
NOTE: Final = "<!-- Written by tools/reference.py from the code; change the texts there. -->"
ROUTES: Final[Mapping[str, Mapping[str, FieldRefusal]]] = {
    "Chats": CHAT.refused,
    "Completions": COMPLETION.refused,
    "Responses": RESPONSES.refused,
    "Messages": MESSAGES.refused,
    "Embeddings": EMBEDDING.refused,
}
NAMES_A_ROW: Final = 16


def refused_fields() -> str:
    """Return the page of refused fields: those of every route first, then the others of each route, by reason."""
    common = set.intersection(*({(name, row.why) for name, row in refused.items()} for refused in ROUTES.values()))
    lines = ["# Refused and ignored fields", "", NOTE, ""]
    lines += ["[What a refusal is, and when it does not apply](../api.md#refused). The error has the same reason.", ""]
    for title, rows in {
        "Every route": common,
        **{route: {(n, r.why) for n, r in refused.items()} - common for route, refused in ROUTES.items()},
    }.items():
        lines += [f"## {title}", "", "| reason | fields |", "| --- | --- |", *by_reason(rows), ""]
    lines += ["## Ignored", "", "Fields of other servers that change no token:", ""]
    lines += ["| reason | fields |", "| --- | --- |", *by_reason(IGNORED.items()), ""]
    return "\n".join(lines)


def by_reason(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    fields = defaultdict(list)
    for name, why in sorted(rows):
        fields[why].append(f"`{name}`")
    for why, names in sorted(fields.items()):
        for start in range(0, len(names), NAMES_A_ROW):
            yield f"| {escaped(why)} | {', '.join(names[start : start + NAMES_A_ROW])} |"


def metrics() -> str:
    """Return the page of metrics, with the names of a scrape."""
    gateway, worker = GatewayMetrics(), WorkerMetrics()
    gateway.registry.register(UsageTotals())
    lines = ["# Every metric", "", NOTE, ""]
    lines += ["[How to read them, and vLLM's and TGI's names](metrics.md).", ""]
    of_gateways = {*rows(gateway.registry.collect()), *fleet_rows()}
    for title, found in (("From gateways", of_gateways), ("From workers", rows(worker.registry.collect()))):
        lines += [f"## {title}", "", "| metric | kind | meaning |", "| --- | --- | --- |"]
        lines += [f"| `{name}` | {kind} | {escaped(text)} |" for name, kind, text in sorted(found)]
        lines.append("")
    return "\n".join(lines)


def rows(families: Iterable[Metric]) -> Iterator[tuple[str, str, str]]:
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        if name.startswith("headstart_"):
            yield name, family.type, family.documentation


def fleet_rows() -> Iterator[tuple[str, str, str]]:
    """Yield the gauges of the fleet, from the source: their collector needs a running gateway."""
    for node in ast.walk(ast.parse((ROOT / "server" / "ops" / "overview.py").read_text(encoding="utf-8"))):
        match node:
            case ast.Call(ast.Name("_gauge"), [ast.Constant(str(name)), ast.Constant(str(text)), *_]):
                if name.startswith("headstart_"):
                    yield name, "gauge", text


def escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def files() -> dict[Path, str]:
    """Return the text of each page."""
    return {
        ROOT / "docs" / "api" / "refused.md": refused_fields(),
        ROOT / "docs" / "kubernetes" / "all_metrics.md": metrics(),
    }
