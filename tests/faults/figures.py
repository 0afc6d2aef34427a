"""Every figure that one gateway shows of its requests, compared with what their clients counted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Any

from server.ops.changes import MAX_CHANGES
from server.usage.day import outcome
from tests.faults.part import ROOT, Gateway, get
from tests.faults.usage_load import AMOUNTS, Counted, UsageFleet
from tests.waiting import HANG_S, wait_until

EDGE_S = 1.0
"""Samples are taken twice a second: so near to the edge of a window an answer may count in it or not."""


def view_of(gateway: Gateway) -> dict[str, Any]:
    """Return what `headstart top` and the dashboard show: one feed makes both."""
    command = [sys.executable, "-m", "server.cli", "top", "--ops", gateway.ops_url, "--once", "--json"]
    shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=HANG_S)
    found: dict[str, Any] = json.loads(shown.stdout)
    return found


def amounts(lines: list[dict[str, Any]]) -> dict[str, int]:
    """Return the sums of lines that `usage_load.check` has compared with the clients' counts."""
    return {
        "prompt_tokens": sum(line["prompt_tokens"] for line in lines),
        "cached_tokens": sum(sum(line["cached_tokens"].values()) for line in lines),
        "output_tokens": sum(line["output_tokens"] for line in lines),
    }


def check_figures(fleet: UsageFleet, done: list[Counted]) -> str:
    """Assert that all figures of the only gateway agree with the clients'. Call it after `check`, with none open."""
    (gateway,) = fleet.gateways
    lines = list(fleet.lines().values())
    assert len(lines) == len(done)
    expected = amounts(lines)
    ends = Counter(outcome(line["status"], finished=line["finished"]) for line in lines)
    errors = Counter(line["error"] for line in lines if line["error"])

    view = view_of(gateway)
    assert view["traffic"]["in_flight"] == 0
    _check_window(view, lines)
    shown_changes = Counter[str]()
    for change in (each for each in view["changes"] if not each["worker"]):
        shown_changes[change["what"]] += change["count"]
    if len(view["changes"]) < MAX_CHANGES:
        assert (shown_changes["refused"], shown_changes["failed"]) == (ends["refused"], ends["failed"]), view["changes"]
    by_tenant = {row["tenant"]: {name: row[name] for name in ("requests", *AMOUNTS)} for row in view["usage"]}
    tenants = sorted({line["tenant"] for line in lines})
    of = {tenant: [line for line in lines if line["tenant"] == tenant] for tenant in tenants}
    assert by_tenant == {tenant: {"requests": len(own), **amounts(own)} for tenant, own in of.items()}

    counted = gateway.metrics()
    assert {name: counted[f"headstart_{name}_total"] for name in AMOUNTS} == expected
    for place in ("pool", "host", "disk", "peer"):
        cached = sum(line["cached_tokens"].get(place, 0) for line in lines)
        assert counted[f"headstart_cached_tokens_by_place_total{{{place}}}"] == cached, place
    answers = Counter(f"headstart_requests_total{{{line['route']},{line['status']}}}" for line in lines)
    assert {name: counted[name] for name in answers} == answers
    assert {code: counted[f"headstart_requests_dropped_total{{{code}}}"] for code in errors} == errors
    num_first = sum(line["first_token_s"] is not None for line in lines)
    assert counted["headstart_time_to_first_token_seconds_count"] == num_first
    assert counted["headstart_requests_in_flight"] == 0

    report = json.loads(get(f"{gateway.ops_url}/history"))
    rows = [dict(zip(report["columns"], row, strict=True)) for row in report["rows"]]
    assert {name: sum(row[name] for row in rows) for name in AMOUNTS} == expected
    assert Counter({name: n for name in set(ends) if (n := sum(row[name] for row in rows))}) == ends
    assert sum((Counter(row["errors"]) for row in rows), Counter()) == errors
    assert sum(sum(row["first_tokens"]) for row in rows) == num_first
    for row in rows:
        assert row["cached_tokens"] <= row["prompt_tokens"]
    return f"{len(done)} requests, equal everywhere: {expected}, {dict(ends)}, errors {dict(errors)}"


def _check_window(view: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    """The last minute has what ended in it, but for what ended at its edge."""
    traffic, at = view["traffic"], view["at"]
    assert traffic["window_s"] <= 60.0
    first = at - traffic["window_s"]
    surely = amounts([line for line in lines if line["ended_at"] > first + EDGE_S])
    at_most = amounts([line for line in lines if line["ended_at"] > first - EDGE_S])
    shown = {"prompt_tokens": traffic["prompt_tokens"]}
    shown["cached_tokens"] = round((traffic["hit_rate"] or 0.0) * traffic["prompt_tokens"])
    for name, amount in shown.items():
        assert surely[name] <= amount <= at_most[name], (name, traffic, surely, at_most)


def wait_closed(fleet: UsageFleet, num_requests: int) -> None:
    """Wait until every request has its line, and none is open."""
    wait_until(lambda: len(fleet.lines()) == num_requests, what="a line for each request")
    (gateway,) = fleet.gateways
    wait_until(lambda: gateway.metrics()["headstart_requests_in_flight"] == 0, what="no request is open")
