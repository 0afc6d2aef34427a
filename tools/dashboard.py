"""The Grafana dashboard, from tools/dashboard.toml, into helm/headstart/files/: `python tools/dashboard.py [--check]`.

A query is an expression and its legend. Expressions are PromQL, with `{{}}` for the selection of the namespace, and
these calls:

    rate(NAME, LABELS)           a counter's rate, by these labels; all labels are optional
    mean(NAME, LABELS)           a histogram's mean
    each(NAME, LABELS)           a gauge's sum by these labels, or by pod
    p95(NAME)                    a histogram's 95th percentile
    quantiles(NAME, LABEL)       three queries, which bring their legends
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
PANELS: Final = ROOT / "tools" / "dashboard.toml"
TARGET: Final = ROOT / "helm" / "headstart" / "files" / "dashboard.json"
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
NAMESPACE: Final = '{namespace=~"$namespace"}'
WIDTH: Final = 8
HEIGHT: Final = 8
QUANTILES: Final = {"0.5": "p50", "0.95": "p95", "0.99": "p99"}
_CALL: Final = re.compile(r"\b(rate|mean|each|p95)\((\w+)(?:, ([\w, ]+))?\)")
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


def variable(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "hide": 0, "skipUrlSync": False, **fields}


def panel(number: int, source: dict[str, Any], x: int, y: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": source["title"],
        "description": source["meaning"],
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": source["unit"], "min": 0, "custom": {"fillOpacity": 5}}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": SOURCE,
                "expr": expression.replace("{{}}", NAMESPACE),
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
        for i, source in enumerate(shown["panels"]):
            panels.append(panel(len(panels) + 1, source, WIDTH * (i % 3), y + HEIGHT * (i // 3)))
        y += HEIGHT * -(-len(shown["panels"]) // 3)
    label_values = "label_values(headstart_requests_in_flight, namespace)"
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
                variable(
                    "namespace",
                    type="query",
                    label="Namespace",
                    datasource=SOURCE,
                    query=label_values,
                    definition=label_values,
                    refresh=2,
                    includeAll=True,
                    multi=True,
                    current={"text": ["All"], "value": ["$__all"]},
                ),
            ]
        },
        "annotations": {"list": []},
        "panels": panels,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    content = json.dumps(dashboard(), indent=1) + "\n"
    stale = not TARGET.exists() or TARGET.read_text() != content
    if stale:
        print(f"{'stale' if check else 'wrote'}: {TARGET.relative_to(ROOT)}")
    if stale and not check:
        TARGET.write_text(content)
    return int(check and stale)


if __name__ == "__main__":
    sys.exit(main())
