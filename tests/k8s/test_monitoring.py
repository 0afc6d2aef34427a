"""The alert rules pass their unit tests, which can fail; the dashboard asks valid questions of metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s import chart
from tests.k8s.metric_names import names_in, names_in_alerts, names_in_chart, names_in_dashboard
from tests.k8s.tools import CHART, ROOT, call, succeed
from tests.tools.test_dashboard import declared

ALERTS = CHART / "files" / "alerts.yaml"
RULES: dict[str, Any] = yaml.safe_load(ALERTS.read_text())
NAMES = [rule["alert"] for group in RULES["groups"] for rule in group["rules"]]


def test_promtool_accepts_the_rules() -> None:
    assert f"{len(NAMES)} rules found" in succeed("promtool", "check", "rules", ALERTS)


def unit_tests(rules: Path, folder: Path) -> int:
    tests = folder / "tests.yaml"
    tests.write_text((Path(__file__).parent / "alert_tests.yaml").read_text().replace("[ALERTS]", f"[{rules}]"))
    return call("promtool", "test", "rules", tests).returncode


def test_alerts_fire_on_what_they_are_for(tmp_path: Path) -> None:
    assert unit_tests(ALERTS, tmp_path) == 0


@pytest.mark.parametrize("expression", ["vector(0) == 1", 'label_replace(vector(1), "namespace", "x", "", "")'])
@pytest.mark.parametrize("name", NAMES)
def test_each_alert_is_tested(name: str, expression: str, tmp_path: Path) -> None:
    """An alert that never fires, or always does, is noticed."""
    rules = json.loads(json.dumps(RULES))
    for group in rules["groups"]:
        for rule in group["rules"]:
            if rule["alert"] == name:
                rule["expr"] = expression
    changed = tmp_path / "rules.yaml"
    changed.write_text(yaml.safe_dump(rules))
    assert unit_tests(changed, tmp_path) != 0


def test_alerts_say_what_to_do() -> None:
    page = (ROOT / "docs" / "kubernetes" / "runbook.md").read_text()
    anchors = {
        re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in re.findall("^#+ (.*)$", page, re.M)
    }
    for group in RULES["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert rule["annotations"]["summary"]
            path, _, anchor = rule["annotations"]["runbook"].partition("#")
            assert path == "docs/kubernetes/runbook.md"
            assert anchor in anchors


def test_the_rendered_rule_is_the_tested_one() -> None:
    (rule,) = chart.of_kind(chart.render("everything-on"), "PrometheusRule")
    assert rule["spec"] == RULES


def test_a_release_without_redis_has_no_alerts_of_the_index() -> None:
    values = {"redis": {"mode": "none"}, "metrics": {"prometheusRule": {"enabled": True}}}
    (rule,) = chart.of_kind(chart.rendered(values), "PrometheusRule")
    assert [group["name"] for group in rule["spec"]["groups"]] == ["headstart-users", "headstart-workers"]


def test_the_dashboard_of_the_chart_is_the_file() -> None:
    (config,) = [
        d
        for d in chart.of_kind(chart.render("everything-on"), "ConfigMap")
        if d["metadata"]["name"].endswith("-dashboard")
    ]
    assert json.loads(config["data"]["headstart.json"]) == json.loads((CHART / "files" / "dashboard.json").read_text())


def test_the_dashboard_asks_valid_questions(tmp_path: Path) -> None:
    """Each expression as a recording rule, which promtool parses."""
    dashboard = json.loads((CHART / "files" / "dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(expressions) > 30
    filled = [
        re.sub(r"\$(namespace|model|tenant|gateway)", ".*", e.replace("$__rate_interval", "5m")) for e in expressions
    ]
    rules = [{"record": f"panel:{i}", "expr": expression} for i, expression in enumerate(filled)]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    succeed("promtool", "check", "rules", path)
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def test_every_metric_that_is_asked_for_is_declared() -> None:
    """The live scrape is asked too, in test_fleet.py; this one names the culprit within a second."""
    asked = names_in_alerts() | names_in_dashboard() | names_in_chart()
    assert asked - declared() == set()


def test_names_are_found() -> None:
    assert names_in('rate(headstart_x_total{a="b"}[5m]) / vllm:y') == {"headstart_x_total", "vllm:y"}
