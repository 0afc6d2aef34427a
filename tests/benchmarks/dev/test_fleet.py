"""The bench of a large fleet, at a small size: what it counts, and that restarts cost no request."""

from __future__ import annotations

import json

import pytest

from benchmarks.dev import fleet


def test_every_figure_comes_out(capfd: pytest.CaptureFixture[str]) -> None:
    small = ["--workers", "70", "--publishes", "70", "--rate", "20", "--seconds", "1", "--restarts", "9"]
    assert fleet.main([*small, "--conversations", "20", "--down-s", "0.2", "--json"]) == 0
    figures = json.loads(capfd.readouterr().out.splitlines()[-1])["figures"]
    assert figures["failed_requests"] == figures["restarts.failed_requests"] == 0
    assert figures["decisions"] > 0
    assert {"used_index", "decision_p99_s", "gateway.cpu", "redis.cpu", "gateway_restart.right_s"} <= figures.keys()
