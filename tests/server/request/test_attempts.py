"""When a request is tried again, and when it is not: `server.request.losses` alone."""

from __future__ import annotations

import pytest

from cache.records import WorkerMember
from cache.types import Epoch, WorkerId
from server.errors import InternalError, WorkerLostError
from server.request.losses import MAX_LOOKS, MAX_LOSSES, MAX_REFUSALS, MAX_SECOND_CHANCES, Losses, Stage
from server.workers.client import WorkerRefused
from worker.wire import Failed


def member(name: str = "w") -> WorkerMember:
    return WorkerMember(WorkerId(name), Epoch("e"), "http://w", "m", "n", "cpu", 16, 4096, protocol=1)


def refused(status: int = 429, retry_after_s: float | None = None) -> WorkerRefused:
    return WorkerRefused(status, Failed("queue_full", "full", retryable=True, retry_after_s=retry_after_s))


def test_two_workers_that_die_while_they_compute_it_are_enough() -> None:
    losses = Losses()
    assert losses.lost(member(), Stage.SENT) is None
    assert not losses.is_suspect, "it never had the request"
    assert losses.lost(member(), Stage.ACCEPTED) is None
    assert losses.is_suspect
    assert losses.lost(member(), Stage.ACCEPTED) is None, "a suspect is not computed before it is said to have begun"
    assert isinstance(losses.lost(member(), Stage.BEGUN), InternalError)


def test_a_token_clears_it() -> None:
    losses = Losses()
    for _ in range(MAX_LOSSES - 1):
        assert losses.lost(member(), Stage.BEGUN) is None
        losses.cleared()
        assert not losses.is_suspect
    assert isinstance(losses.lost(member(), Stage.ANSWERED), WorkerLostError), "and yet there is an end"


def test_refusals_are_passed_over_so_many_times_and_the_soonest_is_told() -> None:
    losses = Losses()
    for retry_after_s in (5.0, 2.0, 9.0):
        assert losses.refused(member(), refused(retry_after_s=retry_after_s))
    assert losses.last_refusal is not None
    assert losses.last_refusal.failed.retry_after_s == 2.0
    assert [losses.refused(member(), refused()) for _ in range(MAX_REFUSALS - 2)] == [True] * (MAX_REFUSALS - 3) + [
        False
    ]


def test_a_worker_that_has_just_begun_another_epoch_is_asked_once_more() -> None:
    losses = Losses()
    losses.refused(member("a"), refused(409))
    assert losses.excluded == set()
    losses.refused(member("a"), refused(409))
    assert losses.excluded == {("a", "e")}


def test_a_connection_that_had_ended_is_no_loss_once() -> None:
    losses = Losses()
    assert [losses.stale(), losses.stale()] == [True, False]


def test_the_lost_have_a_second_chance_unless_the_request_is_suspect() -> None:
    losses = Losses()
    assert not losses.second_chance(), "nobody was lost"
    losses.lost(member("a"), Stage.ANSWERED)
    for _ in range(MAX_SECOND_CHANCES):
        assert losses.second_chance()
        assert losses.excluded == set()
    assert not losses.second_chance()
    suspect = Losses()
    suspect.lost(member("a"), Stage.BEGUN)
    assert not suspect.second_chance()


@pytest.mark.parametrize(("is_lost", "num_looks"), [(False, MAX_LOOKS), (True, 0)])
def test_who_has_lost_nobody_looks_again_for_a_while(is_lost: bool, num_looks: int) -> None:
    losses = Losses()
    if is_lost:
        losses.lost(member(), Stage.ANSWERED)
    assert [losses.look_again() for _ in range(MAX_LOOKS + 1)].count(True) == num_looks
