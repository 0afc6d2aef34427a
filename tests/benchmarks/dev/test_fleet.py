"""The bench of a large fleet, at a small size: what it counts, and that restarts cost no request."""

from __future__ import annotations

import json

import pytest

from benchmarks.dev import fleet
from benchmarks.dev.fleet_load.registry import NUM_CHANGED, OTHER_BLOCKS, Published
from cache.redis_index.schema import Keys, Signer, decode_state, verifies_state
from cache.types import IndexEntry
from tests.members import make_member

KEYS, SIGNER = Keys("headstart", 0), Signer(b"secret", "headstart", 0)


def test_states_are_signed_for_the_time_of_each_publish() -> None:
    published = Published(make_member("w", "e"), KEYS, SIGNER)
    published.sign(1000, 500, 3)
    states = [published.states[-1 - number] for number in range(3)]
    assert all(verifies_state(SIGNER.state_mac("w"), state) for state in states)
    decoded = [decode_state(state) for state in states]
    assert [state.batch for state in decoded] == [1, 2, 3]
    assert [state.written_ms for state in decoded] == [1000, 1500, 2000]
    assert published.registration().count(b"HSET") == 2
    published.publish()
    assert len(published.others) == OTHER_BLOCKS
    assert len(published.states) == 1


def test_a_prompt_finds_what_was_held_before() -> None:
    published = Published(make_member("w", "e"), KEYS, SIGNER)
    blocks = [IndexEntry(bytes([number]) * 8) for number in range(6)]
    assert published.hold(blocks[:4]) == 0
    assert published.hold(blocks) == 4
    published.sign(0, 1, 2)
    published.registration()
    assert published.publish().count(b"$8\r\n") == 2 * NUM_CHANGED + len(blocks)
    assert published.hold(blocks) == 6


def test_a_quantile_is_interpolated_in_its_bucket() -> None:
    name = 'headstart_route_seconds_bucket{{stage="{}",le="{}"}}'
    counts = {"0.001": 50.0, "0.01": 98.0, "0.02": 100.0, "+Inf": 100.0}
    metrics = {name.format("lookup", bound): count for bound, count in counts.items()}
    metrics |= {name.format("choose", bound): 1.0 for bound in counts}
    assert fleet.stage_quantile(metrics, "lookup", 0.99) == pytest.approx(0.015)


def test_every_figure_comes_out(capfd: pytest.CaptureFixture[str]) -> None:
    small = ["--workers", "70", "--publishes", "70", "--rate", "20", "--seconds", "1", "--restarts", "9"]
    assert fleet.main([*small, "--conversations", "20", "--down-s", "0.2", "--json"]) == 0
    figures = json.loads(capfd.readouterr().out.splitlines()[-1])["figures"]
    assert figures["failed_requests"] == figures["restarts.failed_requests"] == 0
    assert figures["decisions"] > 0
    assert {"used_index", "decision_p99_s", "gateway.cpu", "redis.cpu", "gateway_restart.right_s"} <= figures.keys()
