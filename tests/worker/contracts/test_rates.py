"""The rates that a worker measures of itself."""

from __future__ import annotations

from worker.contracts.rates import TransferRate


def test_a_short_transfer_proves_little_and_a_long_one_much() -> None:
    rate = TransferRate(10_000)
    rate.add(16, 0.03, 1.0)  # a block behind a new connection
    assert rate.tokens_per_s(1.0) > 2_000
    rate.add(1_600, 8.0, 2.0)
    assert 150 < rate.tokens_per_s(2.0) < 250


def test_a_late_transfer_counts_as_slow_for_a_while() -> None:
    rate = TransferRate(10_000)
    rate.add(100_000, 10.0, 1.0)
    rate.add(0, 0.5, 2.0)
    assert rate.tokens_per_s(31.0) < 10
    assert rate.tokens_per_s(33.0) == 10_000
    rate.add(16, 0.001, 34.0)
    assert 10 < rate.tokens_per_s(34.0) < 10_000
