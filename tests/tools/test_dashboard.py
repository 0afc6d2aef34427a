"""The Grafana dashboard is built from its panels, and each call of a query gives its PromQL."""

from __future__ import annotations

import json

import pytest

from tools import dashboard


def test_the_file_is_what_the_panels_give() -> None:
    assert dashboard.TARGET.read_text() == json.dumps(dashboard.dashboard(), indent=1) + "\n"


@pytest.mark.parametrize(
    ("expression", "promql"),
    [
        ("rate(a_total)", "sum (rate(a_total{{}}[$__rate_interval]))"),
        ("rate(a_total, pod, end)", "sum by (pod, end) (rate(a_total{{}}[$__rate_interval]))"),
        ("each(a) / each(b, tier)", "sum by (pod) (a{{}}) / sum by (tier) (b{{}})"),
        ("mean(a)", "sum (rate(a_sum{{}}[$__rate_interval])) / sum (rate(a_count{{}}[$__rate_interval]))"),
        ("p95(a)", "histogram_quantile(0.95, sum by (le) (rate(a_bucket{{}}[$__rate_interval])))"),
        ("max by (pod) (a{{}})", "max by (pod) (a{{}})"),
    ],
)
def test_calls(expression: str, promql: str) -> None:
    assert list(dashboard.targets([[expression, "legend"]])) == [(promql, "legend")]


def test_quantiles_bring_their_legends() -> None:
    legends = [legend for _, legend in dashboard.targets([["quantiles(a)"], ["quantiles(a, kind)"]])]
    assert legends == ["p50", "p95", "p99", "p50 {{kind}}", "p95 {{kind}}", "p99 {{kind}}"]
