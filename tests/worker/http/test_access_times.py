from __future__ import annotations

from worker.http.access_times import AccessTimes


def test_ages_are_told_to_about_a_second() -> None:
    times = AccessTimes()
    assert times.age_s(5, 100.0) == 0.0
    for second in range(100):
        for tenth in range(10):
            times.note(10 * second + tenth, second + tenth / 10)
    for access in range(0, 1000, 7):
        assert abs(times.age_s(access, 100.0) - (100.0 - access / 10)) <= 1.0


def test_an_idle_pool_takes_no_room_and_its_age_grows() -> None:
    times = AccessTimes()
    for second in range(20_000):
        times.note(7, float(second))
    assert times.age_s(7, 20_000.0) == 20_000.0
    times.note(8, 20_000.0)
    assert times.age_s(8, 20_001.0) == 1.0
    assert times.copy().age_s(8, 20_001.0) == 1.0


def test_what_is_forgotten_is_at_least_so_old() -> None:
    times = AccessTimes()
    for second in range(10_000):
        times.note(second, float(second))
    assert times.age_s(0, 10_000.0) >= 8_000.0
