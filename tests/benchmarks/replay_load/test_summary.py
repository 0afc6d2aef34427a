"""Figures of known outcomes, and the page that shows them."""

from __future__ import annotations

import re

from benchmarks.replay_load.client import Outcome
from benchmarks.replay_load.page import render
from benchmarks.replay_load.summary import Objective, Run, figures
from benchmarks.report import percentile


def outcome(turn: int, ttft_s: float, *, cached: int = 0, error: str | None = None, worker: str = "w0") -> Outcome:
    return Outcome("c", turn, 0.0, ttft_s, ttft_s + 1.0, [0.5, 0.5], 100, cached, 11, worker, error)


FAST = Run("fast", [outcome(1, 0.1), outcome(2, 0.1, cached=80, worker="w1")], 2, 2.0)
SLOW = Run("slow", [outcome(1, 0.4), outcome(2, 3.0, cached=20), outcome(3, 9.0, error="<429> & gone")], 4, 4.0)
OBJECTIVE = Objective(ttft_s=1.0, time_per_token_s=0.2)


def test_figures() -> None:
    values = {figure.name: figure.value for figure in figures([FAST, SLOW], OBJECTIVE)}
    assert values["fast.ttft_mean_s"] == 0.1
    assert values["fast.cached_share"] == 0.4
    assert values["fast.goodput_per_s"] == 1.0
    assert values["fast.time_per_token_mean_s"] == 0.1
    assert values["slow.ttft_mean_s"] == 1.7  # of the answered ones
    assert (values["slow.requests"], values["slow.errors"], values["slow.not_sent"]) == (2, 1, 1)
    assert values["slow.goodput_per_s"] == 0.25
    assert values["fast_over_slow.cached_tokens"] == 4.0
    assert values["fast_over_slow.ttft_mean"] == 0.1 / 1.7


def test_nothing_answered_is_no_crash() -> None:
    empty = Run("empty", [outcome(1, 0.0, error="refused")], 1, 1.0)
    values = {figure.name: figure.value for figure in figures([empty, empty], OBJECTIVE)}
    assert values["empty.ttft_p99_s"] == 0.0
    assert "Failures" in render([empty], figures([empty], OBJECTIVE), {}, "cmd")


def test_percentiles_are_nearest_ranks() -> None:
    assert [percentile(range(100), share) for share in (0.0, 0.5, 0.99, 1.0)] == [0, 50, 99, 99]


def test_the_page_stands_alone() -> None:
    page = render([FAST, SLOW], figures([FAST, SLOW], OBJECTIVE), {"cpu": "one & two"}, "headstart bench replay x")
    assert page.count("<svg") == 5
    assert not re.search(r"(?:src|href)=\"https?:", page)
    assert "&lt;429&gt; &amp; gone" in page
    assert "one &amp; two" in page
    assert "headstart bench replay x" in page


def test_the_slowest_requests_are_listed_first() -> None:
    slowest = max(outcome.ttft_s for outcome in SLOW.answered)
    page = render([SLOW], figures([SLOW], OBJECTIVE), {}, "cmd")
    listed = re.findall(r'<td class="number">(\d+\.\d\d) s</td>', page)
    assert float(listed[0]) == round(slowest, 2)
    assert listed == sorted(listed, key=float, reverse=True)


def test_plots_that_have_nothing_to_show_are_left_out() -> None:
    run = Run("only", [outcome(1, 0.1, worker="")], 1, 1.0)
    assert render([run], figures([run], OBJECTIVE), {}, "cmd").count("<svg") == 2
