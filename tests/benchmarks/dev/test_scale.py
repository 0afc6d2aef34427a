"""The bench of scaling: a short day, its oracle, and a fleet that changes."""

from __future__ import annotations

import math

import pytest

from benchmarks.dev.scale import day_figures, measure_day, options_of, recorded, settings_of
from benchmarks.dev.scale_load.day import LOW, daily_rate, day_of
from benchmarks.dev.scale_load.elastic import ElasticReplay
from benchmarks.dev.scale_load.oracle import oracle

OPTIONS = options_of(["--minutes", "6", "--peak", "1.5", "--blocks", "1000", "--gateways", "2"])


def test_a_day_has_its_shape_and_its_size() -> None:
    rates = [daily_rate(at / 100) for at in range(101)]
    assert min(rates) == LOW
    assert 0.9 <= max(rates) <= 1.0
    trace = recorded()
    day = day_of(trace, duration_s=1200.0, peak=2.0, prefill_tokens_per_s=24_000.0, seed=1, rate=lambda _: 1.0)
    assert day.num_requests == pytest.approx(2 * 1200 / 2400 * len(trace.sessions), rel=0.15)
    numbers = {session.requests[0].number for session in day.sessions}
    assert len(numbers) == day.num_requests, "copies are other requests"


def test_a_short_day_is_served_and_followed() -> None:
    minutes, best = measure_day(OPTIONS)
    figures = {figure.name: figure.value for figure in day_figures(minutes, best, OPTIONS.objective)}
    assert len(best) == len(minutes) == figures["minutes"] == 6
    assert min(best) == 2
    assert 0.0 <= figures["met_share"] <= 1.0
    assert all(math.isfinite(value) for value in figures.values())
    assert min(minute.num_workers for minute in minutes) >= 2.0


def test_a_fleet_that_shrinks_loses_no_request() -> None:
    """Workers end their requests before they leave, and hand over what they hold."""
    day = day_of(recorded(), duration_s=120.0, peak=1.5, prefill_tokens_per_s=24_000.0, seed=1, rate=lambda _: 1.0)
    settings = settings_of(OPTIONS, 4, OPTIONS.blocks)
    replay = ElasticReplay(day, settings, OPTIONS.objective, lambda now_s, _: 4 if now_s < 60.0 else 2)
    replay.run()
    assert replay.num_handed_blocks > 0
    assert replay.minutes()[0].num_workers == 4.0


def test_the_oracle_follows_the_work() -> None:
    """One request comes each second, of 0.5 s for ten minutes and of 3.5 s for ten more."""
    prefills = [(float(at), 0.5 if at < 600 else 3.5) for at in range(1200)]
    assert oracle(prefills, 4.0, 1) == [1] * 10 + [4] * 10
