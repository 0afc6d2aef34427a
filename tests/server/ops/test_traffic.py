"""Rates and quantiles of the last seconds."""

from __future__ import annotations

import pytest

from server.ops.feed import QUANTILE_WINDOW_S, RATE_WINDOW_S, Totals, Traffic, quantile

INF = float("inf")


def totals(at_s: float, num_decisions: int, cached_tokens: float, *ttft_counts: float) -> Totals:
    counted = {"at_s": at_s, "num_decisions": num_decisions, "prompt_tokens": 100.0 * num_decisions}
    return {**counted, "cached_tokens": cached_tokens, "output_tokens": 0.0, "in_flight": 1, "ttft_counts": ttft_counts}


def test_rates_cover_seconds_and_hits_a_minute() -> None:
    traffic = Traffic((1.0, INF))
    first = traffic.add(totals(0.0, 0, 0.0, 0.0, 0.0))
    assert (first["decisions_per_s"], first["hit_rate"], first["ttft_p50_s"]) == (None, None, None)
    traffic.add(totals(10.0, 100, 5000.0, 100.0, 100.0))
    now = traffic.add(totals(10.0 + RATE_WINDOW_S, 110, 5000.0, 110.0, 110.0))
    assert now["decisions_per_s"] == pytest.approx(10 / RATE_WINDOW_S)
    assert now["hit_rate"] == pytest.approx(5000 / 11000)
    assert now["ttft_p50_s"] == pytest.approx(0.5)
    later = traffic.add(totals(12.0 + RATE_WINDOW_S + QUANTILE_WINDOW_S, 110, 5000.0, 110.0, 110.0))
    assert (later["decisions_per_s"], later["hit_rate"]) == (None, None), "older totals are forgotten"


@pytest.mark.parametrize(
    ("q", "counts", "value"),
    [(0.5, [0, 10, 10], 1.5), (0.9, [5, 10, 10], 1.8), (0.5, [0, 0, 4], 2.0), (0.5, [0, 0, 0], None), (0.5, [], None)],
)
def test_a_quantile_is_interpolated_within_its_bucket(q: float, counts: list[float], value: float | None) -> None:
    assert quantile(q, (1.0, 2.0, INF), counts) == (None if value is None else pytest.approx(value))
