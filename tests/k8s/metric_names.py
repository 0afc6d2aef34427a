"""The names of metrics: in a scrape, and in everything of the chart that asks for them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import yaml

from tests.k8s import chart
from tests.k8s.tools import CHART

_LABELS: Final = re.compile(r"\{[^}]*\}|\b(?:by|without|on|ignoring)\s*\([^)]*\)")
_NAME: Final = re.compile(r"\b(?:headstart_|vllm:)[a-zA-Z0-9_:]+")


def names_in_scrape(text: str) -> set[str]:
    """Every series by name, and histograms' families too."""
    names = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if line and not line.startswith("#")}
    families = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    labelled = {
        f"{name}{suffix}"
        for name in families
        for suffix in ("", "_bucket", "_sum", "_count")
        if f"# TYPE {name} histogram" in text
    }
    return names | families | labelled


def names_in(expression: str) -> set[str]:
    """Return names of metrics; labels stand in braces, or after by, on and the like."""
    return set(_NAME.findall(_LABELS.sub("", expression)))


def names_in_alerts() -> set[str]:
    groups = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]
    recorded = {rule["record"] for group in groups for rule in group["rules"] if "record" in rule}
    expressions = [rule["expr"] for group in groups for rule in group["rules"]]
    return {name for expression in expressions for name in names_in(expression)} - recorded


def names_in_dashboard() -> set[str]:
    dashboard = json.loads((CHART / "files" / "dashboard.json").read_text())
    return {name for expression in _expressions(dashboard) for name in names_in(expression)}


def _expressions(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("expr", "query", "definition") and isinstance(value, str):
                yield value
            else:
                yield from _expressions(value)
    elif isinstance(node, list):
        for value in node:
            yield from _expressions(value)


def names_in_chart() -> set[str]:
    """Those by which the rendered scalers scale."""
    names: set[str] = set()
    for name in chart.MATRIX:
        for document in chart.render(name):
            if document["kind"] == "HorizontalPodAutoscaler":
                metrics = document["spec"]["metrics"]
                kinds = {"Pods": "pods", "External": "external"}
                named = [metric[kinds[metric["type"]]] for metric in metrics if metric["type"] in kinds]
                names |= {each["metric"]["name"] for each in named}
            elif document["kind"] == "ScaledObject":
                names |= _names_in_triggers(document)
    for path in chart.EXAMPLES.glob("keda-*.yaml"):
        for document in chart.parse(path.read_text()):
            names |= _names_in_triggers(document)
    return names


def _names_in_triggers(scaler: chart.Document) -> set[str]:
    return {name for trigger in scaler["spec"]["triggers"] for name in names_in(trigger["metadata"].get("query", ""))}
