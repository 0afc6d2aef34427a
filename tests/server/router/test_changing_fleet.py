"""Placement while the index, workers and their entries in the registry come, go and restart."""

from __future__ import annotations

import pytest

from cache.records import WorkerLoad, WorkerState
from cache.types import WorkerId
from server.router.types import NoWorkerError
from server.workers.fleet import FORGET_S, MAX_POLL_S
from tests.server.router.fleets import BLOCK, RATE, Fleets, chain, incarnations, make_request, member


async def test_without_the_index_a_conversation_stays_where_it_is(three: Fleets) -> None:
    conversations = [chain(30) for _ in range(9)]
    homes = []
    for hashes in conversations:
        placement = await three.place(hashes)
        homes.append(placement.worker.worker_id)
        three.router.started(placement, 0)
        three.router.first_token(placement)
        three.router.closed(placement)
        three.clock.now_s += 1.0
        for name in "abc":
            three.index.memory.publish(WorkerId(name))
    three.index.away = True
    three.clock.now_s += 1.0
    for hashes, home in zip(conversations, homes, strict=True):
        placement = await three.place(hashes + chain(2))
        assert placement.worker.worker_id == home
        assert placement.promised_tokens == 30 * BLOCK
        three.router.closed(placement)
    assert three.index_state()["blind"]
    three.index.away = False
    await three.place(chain(1))
    assert not three.index_state()["blind"]
    three.index.away = True
    three.clock.now_s += 1.0
    await three.place(chain(1))
    assert three.index_state()["blind"]
    three.index.away = False
    three.clock.now_s += 1.0
    await three.fleet.poll()  # a poll by itself notices that the index is back
    assert not three.index_state()["blind"]


async def test_an_empty_registry_removes_no_worker(three: Fleets) -> None:
    for name in "ab":
        three.states[f"http://{name}:8000"] = WorkerState(member(name), WorkerLoad(prefill_tokens_per_s=RATE))
    await three.fleet.poll()
    three.index.memory.clear()
    three.index.registered.clear()
    three.clock.now_s += 60.0
    await three.fleet.poll()
    assert {await three.worker(chain(2)) for _ in range(30)} == {"a", "b"}, "c has no lease and does not answer"
    assert {m.worker_id for m in three.fleet.workers("m")} == set("abc")
    assert [m.worker_id for m in three.fleet.workers("m")][2] == "c"


async def test_a_worker_that_is_gone_for_good_is_forgotten_everywhere(three: Fleets) -> None:
    """With an orchestrator every new worker has another name."""
    await three.fleet.poll()
    placement = await three.place(chain(2), excluded=incarnations("a", "b"))
    three.index.memory.retire(WorkerId("c"))
    del three.index.registered["c"]
    for _ in range(round(FORGET_S / MAX_POLL_S)):
        three.clock.now_s += MAX_POLL_S
        await three.fleet.poll()
        assert {member.worker_id for member in three.fleet.workers("m")} == set("abc")
    three.clock.now_s += 1.0
    await three.fleet.poll()
    assert {member.worker_id for member in three.fleet.workers("m")} == set("ab")
    three.router.closed(placement)
    assert three.router.scorer.loads.num_outstanding() == 0


async def test_estimates_of_workers_that_are_gone_do_not_pile_up() -> None:
    fleets = Fleets()
    for number in range(1000):
        fleets.index.register(member(f"w{number}"))
        await fleets.worker(chain(1))
        fleets.index.memory.retire(WorkerId(f"w{number}"))
        fleets.clock.now_s += 60.0
    assert len(fleets.router.scorer.loads._estimates) <= 64


async def test_workers_from_the_command_line_need_no_registry() -> None:
    fleets = Fleets(workers=("http://z:8000/",))
    fleets.index.away = True
    with pytest.raises(NoWorkerError):
        await fleets.place(chain(1))
    fleets.states["http://z:8000"] = WorkerState(member("z"), WorkerLoad())
    await fleets.fleet.poll()
    assert await fleets.worker(chain(1)) == "z"
    del fleets.states["http://z:8000"]
    await fleets.fleet.poll()
    assert await fleets.worker(chain(1)) == "z", "one late answer, and no other worker"
    await fleets.fleet.poll()
    with pytest.raises(NoWorkerError) as caught:
        await fleets.place(chain(1))
    assert caught.value.is_silent
    with pytest.raises(NoWorkerError) as caught:
        await fleets.place(chain(1), excluded=incarnations("z"))
    assert not caught.value.is_silent, "it could not take this request"


@pytest.mark.parametrize("changes", [{"protocol": 999}, {"secret_check": "x"}])
async def test_a_worker_that_fails_verification_is_logged_once(
    three: Fleets, changes: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    three.index.register(member("d", **changes))
    for _ in range(3):
        assert {await three.worker(chain(2)) for _ in range(10)} <= set("abc")
        await three.fleet.poll()
    assert len([record for record in caplog.records if "is refused" in record.getMessage()]) == 1
    [(url, refused, reason)] = three.fleet.refused()
    assert (url, refused) == ("http://d:8000", member("d", **changes))
    assert reason
    del three.index.registered["d"]
    await three.fleet.poll()
    assert three.fleet.refused() == []


async def test_a_request_goes_to_workers_of_its_revision(three: Fleets) -> None:
    three.index.register(member("d", namespace="other"))
    assert {await three.worker(chain(2), namespace="n") for _ in range(30)} == set("abc")
    assert {await three.worker(chain(2), namespace="other") for _ in range(10)} == {"d"}
    with pytest.raises(NoWorkerError, match="is ready"):
        await three.worker(chain(2), namespace="third")


async def test_a_restarted_worker_has_an_empty_cache_and_queue(three: Fleets) -> None:
    """Pending prefixes and recent placements of the old epoch are not credited to the new one."""
    hashes = chain(40)
    home = (await three.place(hashes)).worker.worker_id
    for name in "abc":
        three.index.register(member(name, epoch="e2"))
    explained = await three.explain(make_request(hashes))
    assert [(worker["outstanding"], worker["wait_s"]) for worker in explained["workers"]] == [(0, 0.0)] * 3
    again = await three.place(hashes)
    assert again.promised_tokens == 0
    three.router.closed(again)
    three.index.away = True
    assert (await three.place(hashes, excluded=incarnations(home))).promised_tokens == 0
