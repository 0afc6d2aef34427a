"""Which workers are known, which are taken to live, and which are left alone for a while."""

from __future__ import annotations

from cache.index import Candidate, WorkerLoad
from cache.types import WorkerId
from tests.server.router.test_router import Fleets, member
from worker.wire import WorkerState


def names(candidates: list[Candidate]) -> set[str]:
    return {candidate.member.worker_id for candidate in candidates}


def static(name: str = "z", **changes: object) -> Fleets:
    """A fleet without Redis, of one worker that answers at a given URL."""
    fleets = Fleets(workers=("http://z:8000",))
    fleets.index.away = True
    fleets.states["http://z:8000"] = WorkerState(member(name, url="http://z:8000"), WorkerLoad(**changes))  # type: ignore[arg-type]
    return fleets


async def test_a_worker_that_fails_is_left_alone_longer_each_time_until_it_is_another() -> None:
    fleets = static()
    await fleets.fleet.poll()
    worker_id = WorkerId("z")
    for pause_s in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        fleets.fleet.report_failure(worker_id)
        fleets.clock.now_s += pause_s - 0.25
        assert fleets.fleet.broken(worker_id)
        fleets.clock.now_s += 0.5
        assert not fleets.fleet.broken(worker_id)
    fleets.fleet.report_failure(worker_id)
    fleets.states["http://z:8000"] = WorkerState(member("z", "e2", url="http://z:8000"), WorkerLoad())
    await fleets.fleet.poll()
    assert not fleets.fleet.broken(worker_id), "it has been started anew"


async def test_who_lives_at_an_address_now_is_who_answers_there() -> None:
    fleets = static("old")
    await fleets.fleet.poll()
    fleets.states["http://z:8000"] = WorkerState(member("new", url="http://z:8000"), WorkerLoad())
    fleets.clock.now_s += 1.0
    await fleets.fleet.poll()
    assert names(fleets.fleet.candidates("m", None)) == {"new"}


async def test_without_a_lease_the_load_is_what_the_worker_itself_says() -> None:
    fleets = static(num_running=7)
    await fleets.fleet.poll()
    (candidate,) = fleets.fleet.candidates("m", None)
    assert (candidate.load.num_running, candidate.matched_blocks, candidate.load_age_s) == (7, 0, 0.0)
    fleets.clock.now_s += 2.0
    (candidate,) = fleets.fleet.candidates("m", None)
    assert candidate.load_age_s == 2.0


async def test_a_worker_that_drains_is_a_candidate_and_no_worker_to_be_ready_with() -> None:
    fleets = static(draining=True)
    await fleets.fleet.poll()
    assert names(fleets.fleet.candidates("m", None)) == {"z"}, "the router says why it is not chosen"
    assert fleets.fleet.live_workers() == []


async def test_a_worker_that_was_heard_of_and_not_asked_has_a_time_of_grace() -> None:
    fleets = Fleets()
    fleets.index.register(member("a"))
    fleets.fleet.candidates("m", fleets.index.memory.match([], "m"))
    fleets.clock.now_s += 4.5
    assert names(fleets.fleet.candidates("m", None)) == {"a"}
    fleets.clock.now_s += 1.0
    assert fleets.fleet.candidates("m", None) == []


async def test_a_worker_that_turns_into_another_kind_is_not_known_any_more() -> None:
    fleets = static()
    await fleets.fleet.poll()
    other = member("z", "e2", url="http://z:8000", namespace="other")
    fleets.states["http://z:8000"] = WorkerState(other, WorkerLoad())
    await fleets.fleet.poll()
    assert fleets.fleet.workers() == []
