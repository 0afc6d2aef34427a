"""The Grafana dashboard, from the panels below, into helm/headstart/files/: `python tools/dashboard.py [--check]`.

Two metrics modules name what can be shown: server/metrics.py and worker/contracts/metrics.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

TARGET: Final = Path(__file__).parent.parent / "helm" / "headstart" / "files" / "dashboard.json"
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
NAMESPACE: Final = 'namespace=~"$namespace"'
WIDTH: Final = 8
HEIGHT: Final = 8


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    """(expression, legend). `{{}}` in an expression stands for the selection of the namespace."""
    meaning: str


def rate(name: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({name}{{{{}}}}[$__rate_interval]))"


def quantiles(name: str, by: str = "") -> tuple[tuple[str, str], ...]:
    labels = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    return tuple(
        (f"histogram_quantile({q}, {rate(name + '_bucket', labels)})", f"p{str(q)[2:].ljust(2, '0')}{legend}")
        for q in ("0.5", "0.95", "0.99")
    )


def mean(name: str, by: str = "") -> str:
    return f"{rate(name + '_sum', by)} / {rate(name + '_count', by)}"


def each(name: str, by: str = "pod") -> str:
    return f"sum by ({by}) ({name}{{{{}}}})"


ROWS: Final[tuple[tuple[str, tuple[Panel, ...]], ...]] = (
    (
        "What users see",
        (
            Panel(
                "Requests",
                "reqps",
                ((rate("headstart_requests_total", "route, status"), "{{route}} {{status}}"),),
                "Answers by route and status.",
            ),
            Panel(
                "Time to first token",
                "s",
                quantiles("headstart_time_to_first_token_seconds"),
                "Of streamed answers, from the request's arrival.",
            ),
            Panel(
                "Time per output token",
                "s",
                quantiles("headstart_time_per_output_token_seconds"),
                "Mean time between the tokens of a streamed answer.",
            ),
            Panel(
                "Duration of a request",
                "s",
                quantiles("headstart_request_seconds", "route"),
                "From arrival to the last byte.",
            ),
            Panel(
                "Requests in flight",
                "short",
                ((each("headstart_requests_in_flight"), "{{pod}}"),),
                "By gateway. KEDA scales the gateways by it.",
            ),
            Panel(
                "Tokens",
                "short",
                (
                    (rate("headstart_prompt_tokens_total"), "prompt tokens/s"),
                    (rate("headstart_output_tokens_total"), "output tokens/s"),
                ),
                "Accepted and generated.",
            ),
        ),
    ),
    (
        "The head start",
        (
            Panel(
                "Prompt tokens found cached",
                "percentunit",
                (
                    (
                        f"{rate('headstart_cached_tokens_total')} / {rate('headstart_prompt_tokens_total')}",
                        "found by workers",
                    ),
                    (
                        f"{rate('headstart_promised_cached_tokens_total')} / {rate('headstart_prompt_tokens_total')}",
                        "promised by the index",
                    ),
                ),
                "The part of all prompt tokens that no worker had to compute, and what the index said beforehand.",
            ),
            Panel(
                "Where cached tokens come from",
                "short",
                (
                    (rate("headstart_cached_tokens_by_place_total", "place"), "{{place}}"),
                    (rate("headstart_planned_fetches_total"), "requests/s with a peer to fetch from"),
                ),
                "Tokens a second: the worker's pool, its tiers below, another worker.",
            ),
            Panel(
                "Client lines removed",
                "short",
                ((rate("headstart_client_lines_removed_total", "rule"), "{{rule}}"),),
                "Prompts a second without a line that an agent wrote for other servers.",
            ),
            Panel(
                "Wrong promises",
                "short",
                ((rate("headstart_promise_error_tokens_total", "direction"), "{{direction}}"),),
                "Tokens a second that the index promised too many, or too few.",
            ),
            Panel(
                "A routing decision",
                "s",
                quantiles("headstart_route_seconds", "stage"),
                "The index's lookup, and the choice.",
            ),
            Panel(
                "Predicted over actual time to first token",
                "short",
                quantiles("headstart_predicted_over_actual_ttft"),
                "From the choice of a worker. 1 is exact.",
            ),
            Panel(
                "The index is blind",
                "short",
                (
                    ("max by (pod) (headstart_index_blind{{}})", "{{pod}}"),
                    ("sum(1 - headstart_worker_index_connected{{}})", "workers without a connection"),
                ),
                "1: this gateway routes by its own memory alone.",
            ),
            Panel(
                "Index events",
                "short",
                (
                    (rate("headstart_index_events_total", "event"), "{{event}}"),
                    (rate("headstart_worker_index_events_total", "event"), "workers: {{event}}"),
                ),
                "Late and failed lookups, the breaker, values and replies of no sense, and what workers put back.",
            ),
            Panel(
                "Blocks published",
                "short",
                ((each("headstart_worker_index_entries"), "{{pod}}"),),
                "What each worker holds in the index.",
            ),
        ),
    ),
    (
        "The fleet",
        (
            Panel(
                "Workers",
                "short",
                (("max by (model, state) (headstart_workers{{}})", "{{model}} {{state}}"),),
                "As the gateways know them.",
            ),
            Panel(
                "Workers lost",
                "short",
                (
                    (rate("headstart_workers_lost_total"), "lost"),
                    (rate("headstart_resumed_total"), "continued elsewhere"),
                    (rate("headstart_quarantined_total"), "refused from now on"),
                    (rate("headstart_restarted_total"), "begun again"),
                ),
                "Attempts whose worker died or hung, and what became of the answers.",
            ),
            Panel(
                "Dropped requests",
                "short",
                ((rate("headstart_requests_dropped_total", "reason"), "{{reason}}"),),
                "Refused or broken off, by the error's code.",
            ),
            Panel(
                "What the gateways hold",
                "short",
                (
                    (each("headstart_requests_booked"), "{{pod}} booked requests"),
                    (each("headstart_held_requests"), "{{pod}} waiting requests"),
                    (each("headstart_asyncio_tasks"), "{{pod}} tasks"),
                    (each("headstart_worker_asyncio_tasks"), "{{pod}} tasks"),
                ),
                "Rises and falls with the load; a line that only rises is a leak.",
            ),
            Panel(
                "Held up",
                "s",
                (
                    *quantiles("headstart_event_loop_delay_seconds"),
                    ("max by (pod) (headstart_event_loop_longest_delay_seconds{{}})", "{{pod}} event loop"),
                    ("max by (pod) (headstart_worker_longest_step_seconds{{}})", "{{pod}} step"),
                ),
                "How late the gateways' event loops are, and the longest step of each worker since the last scrape.",
            ),
            Panel(
                "Tasks that failed",
                "short",
                ((rate("headstart_task_failures_total", "task"), "{{task}}"),),
                "Background tasks of the gateways that were started again: a defect.",
            ),
            Panel(
                "API key files",
                "short",
                ((rate("headstart_api_key_reloads_total", "outcome"), "{{outcome}}"),),
                "Changes that the gateways took, or rejected and kept the keys of before.",
            ),
            Panel(
                "Refusals and early ends",
                "short",
                (
                    (rate("headstart_worker_refusals_total", "status"), "refused {{status}}"),
                    (rate("headstart_client_disconnects_total"), "client gone"),
                ),
                "Refused by a worker and tried elsewhere; clients that left.",
            ),
        ),
    ),
    (
        "The workers",
        (
            Panel(
                "Prefill that waits",
                "s",
                (
                    ("max by (model) (headstart_waiting_prefill_seconds{{}})", "{{model}}, at workers"),
                    ("sum by (model) (headstart_held_prefill_seconds{{}})", "{{model}}, at gateways"),
                ),
                "Of all workers every gateway shows the same, but for the age of its view.",
            ),
            Panel(
                "Tokens that wait",
                "short",
                ((each("headstart_worker_queued_tokens"), "{{pod}}"),),
                "Of sequences that have not started. Autoscaling goes by it.",
            ),
            Panel(
                "Sequences",
                "short",
                (
                    (each("headstart_worker_running_sequences"), "{{pod}} running"),
                    (each("headstart_worker_queue_size"), "{{pod}} waiting"),
                ),
                "Running and waiting.",
            ),
            Panel(
                "Time in the queue", "s", quantiles("headstart_worker_queue_seconds"), "From arrival to the prefill."
            ),
            Panel(
                "KV pool in use",
                "percentunit",
                (
                    (
                        f"1 - {each('headstart_worker_kv_free_blocks')} / {each('headstart_worker_kv_blocks')}",
                        "{{pod}} held by running sequences",
                    ),
                    (
                        f"{each('headstart_worker_kv_cached_blocks')} / {each('headstart_worker_kv_blocks')}",
                        "{{pod}} findable",
                    ),
                ),
                "Blocks in use, and blocks that later requests can find.",
            ),
            Panel(
                "Evictions",
                "short",
                ((rate("headstart_worker_kv_evictions_total", "pod"), "{{pod}}"),),
                "Cached blocks a second that made room. Many, with a falling hit rate: the pool is too small.",
            ),
            Panel(
                "Age of the next victim",
                "short",
                ((each("headstart_worker_kv_lru_tail_age_allocations"), "{{pod}}"),),
                "Allocations since the block that is evicted next was last in use.",
            ),
            Panel(
                "Blocks below the pool",
                "short",
                ((each("headstart_worker_kv_stored_blocks", "pod, tier"), "{{pod}} {{tier}}"),),
                "In host memory and on disk. A flat line at less than the tier's size: it holds all that was computed.",
            ),
            Panel(
                "Blocks on their way",
                "Bps",
                (
                    (rate("headstart_worker_kv_saved_bytes_total", "tier"), "saved to {{tier}}"),
                    (rate("headstart_worker_kv_loaded_bytes_total", "place"), "loaded from {{place}}"),
                    (rate("headstart_worker_kv_served_bytes_total"), "given to peers"),
                ),
                "Between the pools and other places. Far more saved than loaded: the disk wears for nothing.",
            ),
            Panel(
                "Tokens loaded instead of computed",
                "short",
                ((rate("headstart_worker_kv_loaded_tokens_total", "place"), "from {{place}}"),),
                "A second, for requests and for hand-overs.",
            ),
            Panel(
                "Loads",
                "short",
                ((rate("headstart_worker_kv_loads_total", "end"), "{{end}}"),),
                "Complete, short (a miss, or a source that failed), or late and given up; what is missing is computed.",
            ),
            Panel(
                "Time between tokens",
                "s",
                quantiles("headstart_worker_time_between_tokens_seconds"),
                "From one step with decodes to the next: what running sequences wait for each token.",
            ),
            Panel("A step", "s", quantiles("headstart_worker_step_seconds", "kind"), "Forward and sampling."),
            Panel(
                "Parts of a step",
                "s",
                (
                    (mean("headstart_worker_forward_seconds", "kind"), "{{kind}} forward"),
                    (mean("headstart_worker_sample_seconds", "kind"), "{{kind}} sampling"),
                ),
                "Means, on the device: up to the logits, and from there on.",
            ),
            Panel(
                "Host time of a step",
                "s",
                quantiles("headstart_worker_host_seconds", "phase"),
                "Scheduling and bookkeeping, while the device waits.",
            ),
            Panel(
                "Batch",
                "short",
                (
                    (mean("headstart_worker_batch_size"), "sequences"),
                    (mean("headstart_worker_batch_tokens", "kind"), "{{kind}} tokens"),
                ),
                "Means of a step.",
            ),
            Panel(
                "Trouble",
                "short",
                (
                    (rate("headstart_worker_preemptions_total", "pod"), "{{pod}} preempted"),
                    (rate("headstart_worker_step_failures_total", "pod"), "{{pod}} failed steps"),
                    (rate("headstart_worker_request_failures_total", "pod, cause"), "{{pod}} {{cause}}"),
                ),
                "Preempted sequences, steps that raised, requests that failed.",
            ),
            Panel(
                "Prefill rate",
                "short",
                ((each("headstart_worker_prefill_tokens_per_second"), "{{pod}}"),),
                "Tokens a second, as measured and reported to the gateways.",
            ),
            Panel(
                "Prefill and decode of a request",
                "s",
                (
                    (quantiles("headstart_worker_prefill_seconds")[1][0], "until the first token"),
                    (quantiles("headstart_worker_decode_seconds")[1][0], "from there to the end"),
                ),
                "p95 of each.",
            ),
        ),
    ),
)


def variable(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "hide": 0, "skipUrlSync": False, **fields}


def panel(number: int, source: Panel, x: int, y: int) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + i),
            "datasource": SOURCE,
            "expr": expression.replace("{{}}", f"{{{NAMESPACE}}}"),
            "legendFormat": legend,
            "range": True,
        }
        for i, (expression, legend) in enumerate(source.queries)
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": source.title,
        "description": source.meaning,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": source.unit, "min": 0, "custom": {"fillOpacity": 5}}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": targets,
    }


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, sources in ROWS:
        row = {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": []}
        panels.append(row | {"gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})
        y += 1
        for i, source in enumerate(sources):
            panels.append(panel(len(panels) + 1, source, WIDTH * (i % 3), y + HEIGHT * (i // 3)))
        y += HEIGHT * -(-len(sources) // 3)
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
    if stale and not check:
        TARGET.write_text(content)
    return int(check and stale)


if __name__ == "__main__":
    sys.exit(main())
