from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.rates import DecayedSum, TokenBucket


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10)), max_size=20))
def test_a_decayed_sum_does_not_depend_on_the_order(amounts: list[tuple[float, float]]) -> None:
    total = DecayedSum(60.0)
    for at_s, amount in amounts:
        total.add(amount, at_s)
    expected = sum(amount * math.exp((at_s - 100.0) / 60.0) for at_s, amount in amounts)
    assert total.at(100.0) == pytest.approx(expected)


def test_a_bucket_refills_up_to_its_capacity() -> None:
    bucket = TokenBucket(per_s=2.0, capacity=4.0)
    assert [bucket.take(10.0) for _ in range(5)] == [0.0, 0.0, 0.0, 0.0, 0.5]
    assert bucket.take(10.5) == 0.0
    assert bucket.level(1000.0) == 4.0


def test_a_full_bucket_grants_more_than_its_capacity() -> None:
    bucket = TokenBucket(per_s=1.0, capacity=5.0)
    assert bucket.take(0.0, 20.0) == 0.0
    assert bucket.level(0.0) == -15.0
    assert bucket.take(0.0, 20.0) == 20.0
    bucket.add(0.0, 30.0)
    assert bucket.level(0.0) == 5.0
