"""The Grafana dashboard is built from its panels; each query gives its PromQL, and each metric is shown."""

from __future__ import annotations

import re

import pytest
from prometheus_client import generate_latest

from server.metrics import GatewayMetrics
from server.usage.totals import UsageTotals
from tests.k8s.metric_names import names_in_alerts, names_in_dashboard, names_in_scrape
from tests.server.test_metrics import fleet_metrics
from tools import dashboard
from worker.contracts.metrics import VllmNames, WorkerMetrics


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


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("a{{}}", 'a{namespace=~"$namespace"}'),
        ("headstart_worker_x{{}}", 'headstart_worker_x{namespace=~"$namespace"}'),
        ("headstart_x{{}}", 'headstart_x{namespace=~"$namespace",pod=~"$gateway"}'),
        (
            'headstart_workers{{state="serving"}}',
            'headstart_workers{namespace=~"$namespace",model=~"$model",pod=~"$gateway",state="serving"}',
        ),
        (
            "headstart_usage_seconds_total{{}}",
            'headstart_usage_seconds_total{namespace=~"$namespace",tenant=~"$tenant",pod=~"$gateway"}',
        ),
    ],
)
def test_a_variable_selects_the_metrics_with_its_label(expression: str, shown: str) -> None:
    assert dashboard.selected(expression) == shown


def test_the_first_row_is_the_state_and_five_numbers() -> None:
    panels = dashboard.dashboard()["panels"]
    second = [panel["type"] for panel in panels].index("row", 1)
    assert [panel["type"] for panel in panels[1:second]] == ["stat"] * 6
    assert panels[1]["title"] == "State"
    [mapping] = panels[1]["fieldConfig"]["defaults"]["mappings"]
    assert mapping["options"]["0"] == {"text": "well"}


def declared() -> set[str]:
    """Return the names of a scrape of gateway and worker."""
    gateway, worker = GatewayMetrics(), WorkerMetrics()
    gateway.registry.register(fleet_metrics())
    gateway.registry.register(UsageTotals())
    worker.registry.register(VllmNames(worker, "m"))
    return names_in_scrape(generate_latest(gateway.registry).decode()) | names_in_scrape(worker.render().decode())


def test_every_declared_metric_is_shown() -> None:
    """Every metric has a panel or an alert, or it is not worth its series."""
    shown = names_in_dashboard() | names_in_alerts()
    families = {re.sub(r"_(total|created|bucket|sum|count)$", "", name) for name in declared()}
    unseen = {f for f in families if not any(name == f or name.startswith(f + "_") for name in shown)}
    assert {f for f in unseen if not f.startswith("vllm:")} == ALSO_MEASURED


ALSO_MEASURED = {
    "headstart_worker_requests",
    "headstart_worker_request_success",
    "headstart_worker_request_refusals",
    "headstart_worker_prompt_tokens",
    "headstart_worker_cached_tokens",
    "headstart_worker_output_tokens",
    "headstart_worker_batch_growth",
    "headstart_worker_drafts",
    "headstart_worker_draft_tokens",
    "headstart_worker_accepted_draft_tokens",
    "headstart_worker_batch_growth_seconds",
    "headstart_worker_running_max_tokens",
    "headstart_worker_skipped_tokens",
}
"""The worker's side of what the dashboard shows from the gateways, and what TGI's users look for."""
