from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.records import WorkerLoad
from cache.types import Epoch, GatewayId
from server.router.load_tracker import Booking, WorkerBook

ME, OTHER = GatewayId("me"), GatewayId("other")


def book() -> WorkerBook:
    return WorkerBook(Epoch("e"), window_s=60.0)


def test_a_request_waits_is_served_and_leaves() -> None:
    worker = book()
    first, second = worker.book(2.0, 10, now_s=0.0), worker.book(3.0, 20, now_s=0.0)
    assert worker.wait_s(1.0) == 5.0, "nothing is in service: nothing has elapsed"
    first.start(2.0, now_s=1.0)
    assert worker.wait_s(2.5) == 3.5
    assert worker.wait_s(9.0) == 3.0, "what has elapsed counts up to the estimate"
    first.first_token()
    assert worker.wait_s(9.0) == 3.0
    assert (worker.num_queued, worker.num_outstanding, worker.num_blocks) == (1, 2, 30)
    first.close()
    second.close()
    assert (worker.num_queued, worker.num_outstanding, worker.num_blocks, worker.queued_s) == (0, 0, 0, 0.0)


def test_the_estimate_is_corrected_by_what_was_found() -> None:
    worker = book()
    booking = worker.book(5.0, 1, now_s=0.0)
    booking.start(1.0, now_s=0.0)
    assert worker.wait_s(0.0) == 1.0
    booking.start(9.0, now_s=3.0)
    assert worker.wait_s(0.0) == 1.0, "a request starts once"


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["book", "start", "first_token", "close"])), max_size=80))
def test_every_booking_is_closed_exactly_once(actions: list[tuple[int, str]]) -> None:
    worker = book()
    bookings: list[Booking] = []
    closed: set[int] = set()
    for number, action in actions:
        if action == "book":
            bookings.append(worker.book(1.0 + number, number, now_s=0.0))
        elif number < len(bookings):
            if action == "start":
                bookings[number].start(0.5, now_s=0.0)
            elif action == "first_token":
                bookings[number].first_token()
            else:
                assert bookings[number].close() == (number not in closed)
                closed.add(number)
        assert worker.num_outstanding == len(bookings) - len(closed)
        assert worker.wait_s(0.0) >= 0.0
    for booking in bookings:
        booking.close()
    assert (worker.num_outstanding, worker.num_blocks, worker.num_queued, worker.queued_s) == (0, 0, 0, 0.0)


def test_others_work_counts_as_reported_and_ages() -> None:
    worker = book()
    worker.observe(WorkerLoad({ME: 7.0, OTHER: 4.0}), 10.0, ME)
    assert worker.wait_s(10.0) == 4.0, "the books know better about this gateway's own"
    assert worker.wait_s(13.0) == pytest.approx(1.0)
    assert worker.wait_s(99.0) == 0.0
    worker.observe(WorkerLoad({OTHER: 99.0}), 9.0, ME)
    assert worker.wait_s(10.0) == 4.0, "an older report changes nothing"
    assert worker.unseen_s(10.25) == 0.25
    assert worker.unseen_s(25.0) == 1.0, "a report that old says nothing either way"


def test_own_and_others_work_are_done_side_by_side() -> None:
    worker = book()
    worker.observe(WorkerLoad({OTHER: 4.0}), 10.0, ME)
    worker.book(4.0, 1, now_s=10.0)
    assert worker.wait_s(10.0) == 8.0
    assert worker.wait_s(12.0) == pytest.approx(7.0), "of two seconds one was others'"


def test_without_others_nothing_is_unseen() -> None:
    worker = book()
    worker.observe(WorkerLoad({ME: 7.0}), 10.0, ME)
    assert worker.unseen_s(11.0) == 0.0


def test_recent_work_is_the_counters_increase_and_own_work_at_once() -> None:
    worker = book()
    worker.observe(WorkerLoad(assigned_prefill_s=100.0), 0.0, ME)
    assert worker.recent_s(0.0) == 0.0, "what was assigned before this gateway looked is not recent"
    worker.book(3.0, 1, now_s=1.0)
    assert worker.recent_s(1.0) == 3.0
    worker.observe(WorkerLoad(assigned_prefill_s=105.0), 1.5, ME)
    assert worker.recent_s(1.5) == pytest.approx(5.0), "the 3 are among the 5"
    assert worker.recent_s(61.5) == pytest.approx(5.0 / math.e)


def test_without_reports_own_work_decays_and_is_not_counted_twice_later() -> None:
    worker = book()
    worker.observe(WorkerLoad(assigned_prefill_s=0.0), 0.0, ME)
    worker.book(3.0, 1, now_s=1.0)
    assert worker.recent_s(61.0) == pytest.approx(3.0 / math.e)
    worker.observe(WorkerLoad(assigned_prefill_s=0.0), 0.0, ME)  # the old report is seen at every decision
    worker.observe(WorkerLoad(assigned_prefill_s=3.0), 61.0, ME)
    assert worker.recent_s(61.0) == pytest.approx(3.0 / math.e)


def test_blocks_arrive_until_a_report_shows_them() -> None:
    worker = book()
    first, second = worker.book(1.0, 10, 0.0, num_new_blocks=8), worker.book(1.0, 10, 0.0, num_new_blocks=5)
    assert worker.arriving_blocks(0.0) == 13
    first.start(1.0, now_s=1.0)
    worker.observe(WorkerLoad(), 0.9, ME)
    assert worker.arriving_blocks(1.1) == 13, "written before it began"
    worker.observe(WorkerLoad(), 1.2, ME)
    assert worker.arriving_blocks(1.3) == 5
    second.close()
    first.close()
    assert worker.arriving_blocks(1.3) == 0, "a request that never began takes nothing"


def test_without_reports_blocks_do_not_arrive_for_ever() -> None:
    worker = book()
    worker.book(1.0, 10, 0.0, num_new_blocks=8).start(1.0, now_s=0.0)
    assert worker.arriving_blocks(0.5) == 8
    assert worker.arriving_blocks(5.0) == 0


def test_a_slow_measurement_is_believed_less_the_older_it_is() -> None:
    worker = book()
    assert worker.prefill_rate(1000.0, 0.0) == 1000.0, "nothing was measured"
    worker.observe(WorkerLoad(prefill_tokens_per_s=200.0), 0.0, ME)
    assert worker.prefill_rate(1000.0, 0.0) == 200.0
    rates = [worker.prefill_rate(1000.0, now_s) for now_s in (60.0, 150.0, 600.0)]
    assert rates == sorted(rates)
    assert rates[1] == pytest.approx(600.0)
    assert rates[2] == 1000.0
    worker.observe(WorkerLoad(prefill_tokens_per_s=210.0), 600.0, ME)
    assert worker.prefill_rate(1000.0, 600.0) == 210.0, "measured again"
    worker.observe(WorkerLoad(prefill_tokens_per_s=2000.0), 700.0, ME)
    assert worker.prefill_rate(1000.0, 9999.0) == 2000.0, "a fast one is measured at once when it is not"


SECONDS = st.integers(1, 40).map(lambda quarter_s: quarter_s / 4)


def first_token_s(left_s: list[float], own_s: float) -> float:
    """By the rule itself, in steps: half to the oldest, half to the shortest other, until the last of all is done."""
    running = [*left_s, own_s]
    mine, now_s = len(left_s), 0.0
    while running[mine] > 1e-9:
        waiting = [n for n, seconds in enumerate(running) if seconds > 1e-9]
        served = waiting[:1] if len(waiting) == 1 else [waiting[0], min(waiting[1:], key=lambda n: (running[n], -n))]
        step_s = min(running[n] for n in served) * len(served)
        for n in served:
            running[n] -= step_s / len(served)
        now_s += step_s
    return now_s


@given(st.lists(SECONDS, max_size=5), SECONDS)
def test_a_worker_that_shares_itself_out_lets_the_short_pass(left_s: list[float], own_s: float) -> None:
    worker = book()
    for seconds in left_s:
        worker.book(seconds, 1, now_s=0.0).start(seconds, now_s=0.0)
    wait_s, num_longer = worker.shared_wait_s(own_s, 0.0)
    ends_s = first_token_s(left_s, own_s)
    assert wait_s + own_s <= ends_s + 1e-6, "at most what the rule gives it: a new oldest may take its half on"
    assert wait_s + own_s >= 0.5 * ends_s
    assert num_longer <= len(left_s)
    if len(left_s) < 2:
        assert wait_s + own_s == pytest.approx(ends_s)


@given(st.lists(SECONDS, min_size=1, max_size=5), st.integers(1, 160).map(lambda quarter_s: quarter_s / 4))
def test_what_the_started_have_had_is_taken_off(left_s: list[float], elapsed_s: float) -> None:
    """However often it is asked in between, and never more than there was."""
    often, once = book(), book()
    for worker in (often, once):
        for seconds in left_s:
            worker.book(seconds, 1, now_s=0.0).start(seconds, now_s=0.0)
    for part in range(1, 4):
        often.shared_wait_s(1.0, elapsed_s * part / 4)
    huge_s = 1e6
    left = max(0.0, sum(left_s) - elapsed_s)
    assert often.shared_wait_s(huge_s, elapsed_s)[0] == pytest.approx(left, abs=1e-6)
    assert once.shared_wait_s(huge_s, elapsed_s)[0] == pytest.approx(left, abs=1e-6)


def test_a_shared_worker_counts_those_that_would_wait_and_the_work_of_others() -> None:
    worker = book()
    worker.book(8.0, 1, now_s=0.0).start(8.0, now_s=0.0)
    assert worker.shared_wait_s(2.0, 0.0) == (2.0, 0.5), "beside the oldest it has half"
    worker.book(3.0, 1, now_s=0.0).start(3.0, now_s=0.0)
    assert worker.shared_wait_s(5.0, 0.0) == (11.0, 0.5)
    assert worker.shared_wait_s(2.0, 0.0) == (2.0, 1.5), "it passes the three seconds"
    worker.observe(WorkerLoad({OTHER: 4.0}), 0.0, ME)
    assert worker.shared_wait_s(20.0, 0.0)[0] == 15.0


def test_a_long_queue_costs_no_more_to_look_at() -> None:
    worker = book()
    for _ in range(1024):
        worker.book(1.0, 1, now_s=0.0)
    wait_s, num_longer = worker.shared_wait_s(2.0, 0.0)
    assert wait_s == pytest.approx(1024, rel=0.02)
    assert num_longer == 0.0
