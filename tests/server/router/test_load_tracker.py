from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.records import WorkerLoad
from cache.types import Epoch, GatewayId
from server.router.load_tracker import FifoLoadEstimate, TrackedRequest, WorkerLoadEstimate

ME, OTHER = GatewayId("me"), GatewayId("other")


def shared() -> WorkerLoadEstimate:
    """A worker whose prefills share each step, as ours do."""
    return WorkerLoadEstimate(Epoch("e"), window_s=60.0)


def fifo() -> WorkerLoadEstimate:
    """A worker that runs prefills one by one."""
    return FifoLoadEstimate(Epoch("e"), window_s=60.0)


def queue_s(worker: WorkerLoadEstimate, now_s: float) -> float:
    return worker.delay(1.0, now_s)[0]


def test_a_request_is_queued_served_and_closed() -> None:
    worker = fifo()
    first, second = worker.add(2.0, 10, now_s=0.0), worker.add(3.0, 20, now_s=0.0)
    assert worker.delay(1.0, 1.0) == (5.0, 0.0), "nothing is in service: nothing has elapsed"
    worker.start(first, 2.0, 0, now_s=1.0)
    assert queue_s(worker, 2.5) == 3.5
    assert queue_s(worker, 9.0) == 3.0, "what has elapsed counts up to the estimate"
    worker.first_token(first, 9.0)
    assert queue_s(worker, 9.0) == 3.0
    assert (worker.num_queued, worker.num_outstanding) == (1, 2)
    worker.close(first, 1.0)
    worker.close(second, 1.0)
    assert (worker.num_queued, worker.num_outstanding, worker.queued_s) == (0, 0, 0.0)


def test_the_estimate_is_corrected_by_the_cached_tokens() -> None:
    worker = fifo()
    request = worker.add(5.0, 1, now_s=0.0)
    worker.start(request, 1.0, 0, now_s=0.0)
    assert queue_s(worker, 0.0) == 1.0
    worker.start(request, 9.0, 0, now_s=3.0)
    assert queue_s(worker, 0.0) == 1.0, "a request starts once"


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["add", "start", "first_token", "close"])), max_size=80))
def test_every_request_is_closed_exactly_once(actions: list[tuple[int, str]]) -> None:
    worker = fifo()
    requests: list[TrackedRequest] = []
    closed: set[int] = set()
    for number, action in actions:
        if action == "add":
            requests.append(worker.add(1.0 + number, number, now_s=0.0))
        elif number < len(requests):
            if action == "start":
                worker.start(requests[number], 0.5, 0, now_s=0.0)
            elif action == "first_token":
                worker.first_token(requests[number], 0.0)
            else:
                if number not in closed:
                    worker.close(requests[number], 1.0)
                closed.add(number)
        assert worker.num_outstanding == len(requests) - len(closed)
        assert queue_s(worker, 0.0) >= 0.0
    for number in {*range(len(requests))} - closed:
        worker.close(requests[number], 1.0)
    assert (worker.num_outstanding, worker.num_queued, worker.queued_s) == (0, 0, 0.0)


def test_the_work_of_others_counts_as_reported_and_ages() -> None:
    worker = fifo()
    worker.observe(WorkerLoad({ME: 7.0, OTHER: 4.0}), 10.0, ME)
    assert queue_s(worker, 10.0) == 4.0, "the estimate of this gateway's own requests is newer than the report"
    assert queue_s(worker, 13.0) == pytest.approx(1.0)
    assert queue_s(worker, 99.0) == 0.0
    worker.observe(WorkerLoad({OTHER: 99.0}), 9.0, ME)
    assert queue_s(worker, 10.0) == 4.0, "an older report changes nothing"
    assert worker.report_age_s(10.25) == 0.25
    assert worker.report_age_s(25.0) == 1.0, "a report that old says nothing either way"


def test_own_work_and_that_of_others_proceed_together() -> None:
    worker = fifo()
    worker.observe(WorkerLoad({OTHER: 4.0}), 10.0, ME)
    worker.add(4.0, 1, now_s=10.0)
    assert queue_s(worker, 10.0) == 8.0
    assert queue_s(worker, 12.0) == pytest.approx(7.0), "of two seconds one was the others'"


def test_without_others_the_report_age_is_zero() -> None:
    worker = fifo()
    worker.observe(WorkerLoad({ME: 7.0}), 10.0, ME)
    assert worker.report_age_s(11.0) == 0.0


def test_assigned_work_includes_own_work_at_once() -> None:
    """Other work is the increase of the worker's counter."""
    worker = fifo()
    worker.observe(WorkerLoad(assigned_prefill_s=100.0), 0.0, ME)
    assert worker.assigned.at(0.0) == 0.0, "work assigned before this gateway looked is not recent"
    worker.add(3.0, 1, now_s=1.0)
    assert worker.assigned.at(1.0) == 3.0
    worker.observe(WorkerLoad(assigned_prefill_s=105.0), 1.5, ME)
    assert worker.assigned.at(1.5) == pytest.approx(5.0), "the 3 are among the 5"
    assert worker.assigned.at(61.5) == pytest.approx(5.0 / math.e)


def test_own_work_is_not_counted_twice_by_a_late_report() -> None:
    worker = fifo()
    worker.observe(WorkerLoad(assigned_prefill_s=0.0), 0.0, ME)
    worker.add(3.0, 1, now_s=1.0)
    assert worker.assigned.at(61.0) == pytest.approx(3.0 / math.e)
    worker.observe(WorkerLoad(assigned_prefill_s=0.0), 0.0, ME)  # the old report is seen at every decision
    worker.observe(WorkerLoad(assigned_prefill_s=3.0), 61.0, ME)
    assert worker.assigned.at(61.0) == pytest.approx(3.0 / math.e)


def test_own_blocks_count_while_they_live() -> None:
    """Once each, whether a report has them or not; what else a report has counts too."""
    worker = fifo()

    def held(num_reported: int) -> int:
        return worker.num_used_blocks(WorkerLoad(num_blocks=100, num_free_blocks=100 - num_reported))

    first, second = worker.add(1.0, 10, 0.0, num_new_blocks=10), worker.add(1.0, 10, 0.1, num_new_blocks=5)
    assert held(0) == 15
    assert held(3) == 18, "of others"
    worker.observe(WorkerLoad(), 0.05, ME)
    assert held(10) == 15, "the report has the first"
    worker.close(first, 1.3, num_shared_blocks=5)
    assert held(10) == 10
    worker.observe(WorkerLoad(), 1.5, ME)
    assert held(14) == 14, "answers have grown"
    worker.close(second, 1.6)
    assert held(14) == 4


def test_a_slow_measurement_counts_less_the_older_it_is() -> None:
    worker = fifo()
    assert worker.prefill_tokens_per_s(1000.0, 0.0) == 1000.0, "nothing was measured"
    worker.observe(WorkerLoad(prefill_tokens_per_s=200.0), 0.0, ME)
    assert worker.prefill_tokens_per_s(1000.0, 0.0) == 200.0
    rates = [worker.prefill_tokens_per_s(1000.0, now_s) for now_s in (60.0, 150.0, 600.0)]
    assert rates == sorted(rates)
    assert rates[1] == pytest.approx(600.0)
    assert rates[2] == 1000.0
    worker.observe(WorkerLoad(prefill_tokens_per_s=210.0), 600.0, ME)
    assert worker.prefill_tokens_per_s(1000.0, 600.0) == 210.0, "measured again"
    worker.observe(WorkerLoad(prefill_tokens_per_s=2000.0), 700.0, ME)
    assert worker.prefill_tokens_per_s(1000.0, 9999.0) == 2000.0, "a fast worker is measured whenever it slows down"


@pytest.mark.parametrize(("times", "counted"), [(0.4, 800.0), (0.75, 2000.0), (1.4, 2000.0), (2.0, 4000.0)])
def test_own_prefills_contradict_a_wrong_rate(times: float, counted: float) -> None:
    """Two at a time, each of 2,000 tokens, take 1 s each at the rate that is reported."""
    worker, now_s = shared(), 0.0
    worker.observe(WorkerLoad(prefill_tokens_per_s=2000.0), 0.0, ME)
    for _ in range(6):
        pair = [worker.add(1.0, 1, now_s=now_s) for _ in range(2)]
        for each in pair:
            worker.start(each, 1.0, 2000, now_s=now_s)
        for each in pair:
            now_s += 1.0 / times
            worker.first_token(each, now_s)
        worker.close(worker.add(1.0, 1, now_s=now_s), now_s)
    assert worker.prefill_tokens_per_s(2000.0, now_s) == pytest.approx(counted, rel=0.1)
    assert worker.prefill_tokens_per_s(2000.0, now_s + 600.0) == 2000.0, "nothing was seen lately"
    worker.observe(WorkerLoad({OTHER: 1.0}, prefill_tokens_per_s=2000.0), now_s, ME)
    assert worker.prefill_tokens_per_s(2000.0, now_s) == 2000.0, "the time may be another gateway's"


def test_short_prefills_say_nothing_of_the_rate() -> None:
    """Prompts that are nearly all cached wait for a step of the batch."""
    worker = shared()
    worker.observe(WorkerLoad(prefill_tokens_per_s=2000.0, prefill_fixed_s=0.01), 0.0, ME)
    for step in range(200):
        request = worker.add(0.02, 1, now_s=0.1 * step)
        worker.start(request, 0.02, 20, now_s=0.1 * step)
        worker.first_token(request, 0.1 * step + 0.06)
    assert worker.prefill_tokens_per_s(2000.0, 20.0) == 2000.0


def test_a_prefill_without_an_end_says_nothing_of_the_rate() -> None:
    worker = shared()
    worker.observe(WorkerLoad(prefill_tokens_per_s=2000.0), 0.0, ME)
    for now_s in range(0, 60, 10):
        request, cancelled = (worker.add(1.0, 1, now_s=float(now_s)) for _ in range(2))
        worker.start(request, 1.0, 2000, now_s=float(now_s))
        worker.first_token(request, now_s + 1.0)
        worker.start(cancelled, 1.0, 2000, now_s=now_s + 1.0)
        worker.close(cancelled, now_s + 9.0)
    assert worker.prefill_tokens_per_s(2000.0, 60.0) == 2000.0


SECONDS = st.integers(1, 40).map(lambda quarter_s: quarter_s / 4)


def first_token_s(remaining_s: list[float], prefill_s: float) -> float:
    """Step through the rule itself: half to the oldest, half to the shortest other, until the last of all is done."""
    running = [*remaining_s, prefill_s]
    mine, now_s = len(remaining_s), 0.0
    while running[mine] > 1e-9:
        waiting = [n for n, seconds in enumerate(running) if seconds > 1e-9]
        served = waiting[:1] if len(waiting) == 1 else [waiting[0], min(waiting[1:], key=lambda n: (running[n], -n))]
        step_s = min(running[n] for n in served) * len(served)
        for n in served:
            running[n] -= step_s / len(served)
        now_s += step_s
    return now_s


@given(st.lists(SECONDS, max_size=5), SECONDS)
def test_short_prefills_pass_long_ones(remaining_s: list[float], prefill_s: float) -> None:
    worker = shared()
    for seconds in remaining_s:
        worker.start(worker.add(seconds, 1, now_s=0.0), seconds, 0, now_s=0.0)
    delay_s, num_displaced = worker.delay(prefill_s, 0.0)
    ends_s = first_token_s(remaining_s, prefill_s)
    assert delay_s + prefill_s <= ends_s + 1e-6, "at most what the rule gives: a new oldest may keep its half"
    assert delay_s + prefill_s >= 0.5 * ends_s
    assert num_displaced <= len(remaining_s)
    if len(remaining_s) < 2:
        assert delay_s + prefill_s == pytest.approx(ends_s)


@given(st.lists(SECONDS, min_size=1, max_size=5), st.integers(1, 160).map(lambda quarter_s: quarter_s / 4))
def test_elapsed_time_is_subtracted_from_started_prefills(remaining_s: list[float], elapsed_s: float) -> None:
    """However often the queue is asked for in between, and never more than there was."""
    often, once = shared(), shared()
    for worker in (often, once):
        for seconds in remaining_s:
            worker.start(worker.add(seconds, 1, now_s=0.0), seconds, 0, now_s=0.0)
    for part in range(1, 4):
        often.delay(1.0, elapsed_s * part / 4)
    huge_s = 1e6
    left_s = max(0.0, sum(remaining_s) - elapsed_s)
    assert often.delay(huge_s, elapsed_s)[0] == pytest.approx(left_s, abs=1e-6)
    assert once.delay(huge_s, elapsed_s)[0] == pytest.approx(left_s, abs=1e-6)


def test_a_shared_queue_counts_displaced_prefills() -> None:
    """And the work of other gateways."""
    worker = shared()
    worker.start(worker.add(8.0, 1, now_s=0.0), 8.0, 0, now_s=0.0)
    assert worker.delay(2.0, 0.0) == (2.0, 0.5), "it shares each step with the oldest"
    worker.start(worker.add(3.0, 1, now_s=0.0), 3.0, 0, now_s=0.0)
    assert worker.delay(5.0, 0.0) == (11.0, 0.5)
    assert worker.delay(2.0, 0.0) == (2.0, 1.5), "it passes the three seconds"
    worker.observe(WorkerLoad({OTHER: 4.0}), 0.0, ME)
    assert worker.delay(20.0, 0.0)[0] == 15.0


def test_a_long_queue_costs_no_more_to_look_at() -> None:
    worker = shared()
    for _ in range(1024):
        worker.add(1.0, 1, now_s=0.0)
    delay_s, num_displaced = worker.delay(2.0, 0.0)
    assert delay_s == pytest.approx(1024, rel=0.02)
    assert num_displaced == 0.0
