"""The Grafana dashboard, from tools/dashboard.toml, into helm/headstart/files/.

A query is an expression and its legend. Expressions are PromQL, with `{{}}` for the selection by the board's variables,
`{{label="value"}}` for more, and these calls:

    rate(NAME, LABELS)           a counter's rate, by these labels; all labels are optional
    mean(NAME, LABELS)           a histogram's mean
    each(NAME, LABELS)           a gauge's sum by these labels, or by pod
    p95(NAME)                    a histogram's 95th percentile
    quantiles(NAME, LABEL)       three queries, which bring their legends
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
PANELS: Final = ROOT / "tools" / "dashboard.toml"
TARGET: Final = ROOT / "helm" / "headstart" / "files" / "dashboard.json"
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
WIDTH: Final = 8
HEIGHT: Final = 8
NUMBER_HEIGHT: Final = 4
BY_MODEL: Final = ("headstart_workers", "headstart_waiting_prefill_seconds", "headstart_held")
"""Beginnings of the names of metrics that have the label `model`."""
VARIABLES: Final = {
    "namespace": ("Namespace", "headstart_requests_in_flight", "namespace"),
    "model": ("Model", "headstart_workers", "model"),
    "tenant": ("Tenant", "headstart_usage_requests_total", "tenant"),
    "gateway": ("Gateway", "headstart_requests_in_flight", "pod"),
}
"""By name of a variable its title, and the metric and the label with its values."""
STEPS: Final = {"good": "green", "warn": "orange", "bad": "red"}
QUANTILES: Final = {"0.5": "p50", "0.95": "p95", "0.99": "p99"}
_CALL: Final = re.compile(r"\b(rate|mean|each|p95)\((\w+)(?:, ([\w, ]+))?\)")
_SELECTION: Final = re.compile(r"([\w:]+)\{\{(.*?)\}\}")
_QUANTILES: Final = re.compile(r"quantiles\((\w+)(?:, (\w+))?\)")


def rate(name: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({name}{{{{}}}}[$__rate_interval]))"


def quantile(share: str, name: str, by: str = "") -> str:
    return f"histogram_quantile({share}, {rate(name + '_bucket', f'le, {by}' if by else 'le')})"


def promql(expression: str) -> str:
    """Return an expression with its calls replaced."""

    def call(match: re.Match[str]) -> str:
        function, name, by = match.groups(default="")
        if function == "rate":
            return rate(name, by)
        if function == "mean":
            return f"{rate(name + '_sum', by)} / {rate(name + '_count', by)}"
        return f"sum by ({by or 'pod'}) ({name}{{{{}}}})" if function == "each" else quantile("0.95", name, by)

    return _CALL.sub(call, expression)


def targets(queries: list[list[str]]) -> Iterator[tuple[str, str]]:
    """Yield the expression and the legend of each line of a panel."""
    for expression, *legend in queries:
        if match := _QUANTILES.fullmatch(expression):
            name, by = match.groups(default="")
            for share, label in QUANTILES.items():
                yield quantile(share, name, by), f"{label} {{{{{by}}}}}" if by else label
        else:
            yield promql(expression), legend[0]


def selected(expression: str) -> str:
    """Return an expression with the labels of each metric that the board's variables select."""

    def labels(match: re.Match[str]) -> str:
        name, *more = match[1], 'namespace=~"$namespace"'
        if name.startswith(BY_MODEL):
            more.append('model=~"$model"')
        if name.startswith("headstart_usage_"):
            more.append('tenant=~"$tenant"')
        if name.startswith("headstart_") and not name.startswith("headstart_worker_"):
            more.append('pod=~"$gateway"')
        return f"{name}{{{','.join([*more, *filter(None, [match[2]])])}}}"

    return _SELECTION.sub(labels, expression)


def variable(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "hide": 0, "skipUrlSync": False, **fields}


def shown_as(source: dict[str, Any]) -> dict[str, Any]:
    """Return what draws the panel: a plot, or one number with its colour."""
    if "steps" not in source:
        defaults = {"unit": source["unit"], "min": 0, "custom": {"fillOpacity": 5}}
        options = {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
        return {"type": "timeseries", "fieldConfig": {"defaults": defaults, "overrides": []}, "options": options}
    steps = [{"color": STEPS[tone], "value": value or None} for tone, value in source["steps"]]
    words = {str(value): {"text": text} for value, text in enumerate(source.get("words", ()))}
    defaults = {
        "unit": source["unit"],
        "thresholds": {"mode": "absolute", "steps": steps},
        "mappings": [{"type": "value", "options": words}] if words else [],
    }
    options = {"colorMode": "background" if words else "value", "graphMode": "none" if words else "area"}
    options["reduceOptions"] = {"calcs": ["lastNotNull"]}
    return {"type": "stat", "fieldConfig": {"defaults": defaults, "overrides": []}, "options": options}


def panel(number: int, source: dict[str, Any], place: tuple[int, int, int, int]) -> dict[str, Any]:
    return {
        "id": number,
        **shown_as(source),
        "title": source["title"],
        "description": source["meaning"],
        "datasource": SOURCE,
        "gridPos": dict(zip("xywh", place, strict=True)),
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": SOURCE,
                "expr": selected(expression),
                "legendFormat": legend,
                "range": True,
            }
            for i, (expression, legend) in enumerate(targets(source["queries"]))
        ],
    }


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for shown in tomllib.loads(PANELS.read_text())["rows"]:
        row = {"id": len(panels) + 1, "type": "row", "title": shown["title"], "collapsed": False, "panels": []}
        panels.append(row | {"gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})
        y += 1
        width, height = (4, NUMBER_HEIGHT) if "steps" in shown["panels"][0] else (WIDTH, HEIGHT)
        in_line = 24 // width
        for i, source in enumerate(shown["panels"]):
            place = (width * (i % in_line), y + height * (i // in_line), width, height)
            panels.append(panel(len(panels) + 1, source, place))
        y += height * -(-len(shown["panels"]) // in_line)
    return {
        "uid": "headstart",
        "title": "Headstart",
        "tags": ["llm", "headstart"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                variable("datasource", type="datasource", query="prometheus", label="Data source"),
                *(
                    variable(
                        name,
                        type="query",
                        label=title,
                        datasource=SOURCE,
                        query=f"label_values({metric}, {label})",
                        definition=f"label_values({metric}, {label})",
                        refresh=2,
                        includeAll=True,
                        allValue=".*",
                        multi=True,
                        current={"text": ["All"], "value": ["$__all"]},
                    )
                    for name, (title, metric, label) in VARIABLES.items()
                ),
            ]
        },
        "annotations": {"list": []},
        "panels": panels,
    }


def files() -> dict[Path, str]:
    """Return the text of the file."""
    return {TARGET: json.dumps(dashboard(), indent=1) + "\n"}
