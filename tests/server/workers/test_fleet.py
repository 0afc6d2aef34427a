"""Which workers are known, which count as live, and whose circuit breaker is open."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from cache.records import Candidate, WorkerLoad, WorkerMember, WorkerState, signed
from cache.types import WorkerId
from server.workers import networks
from server.workers.client import WorkerClient
from server.workers.connection import WorkerAbsent, WorkerLost
from server.workers.fleet import FORGET_S, MAX_POLL_S, Fleet
from server.workers.networks import AddressInfo, WorkerNetworks
from tests.running import listening
from tests.server.router.fleets import Clock, Fleets, Index, member
from worker.wire import pack


def names(candidates: list[Candidate]) -> set[str]:
    return {candidate.member.worker_id for candidate in candidates}


def static(name: str = "z", **changes: object) -> Fleets:
    """A fleet without Redis, of one worker that answers at a given URL."""
    fleets = Fleets(workers=("http://z:8000",))
    fleets.index.away = True
    fleets.states["http://z:8000"] = WorkerState(member(name, url="http://z:8000"), WorkerLoad(**changes))  # type: ignore[arg-type]
    return fleets


async def test_the_breaker_opens_for_longer_each_time() -> None:
    """Until the worker restarts."""
    fleets = static()
    await fleets.fleet.poll()
    worker_id = WorkerId("z")
    for pause_s in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        fleets.fleet.report_failure(worker_id)
        fleets.clock.now_s += pause_s - 0.25
        assert worker_id in fleets.fleet.broken()
        fleets.clock.now_s += 0.5
        assert worker_id not in fleets.fleet.broken()
    fleets.fleet.report_failure(worker_id)
    fleets.states["http://z:8000"] = WorkerState(member("z", "e2", url="http://z:8000"), WorkerLoad())
    await fleets.fleet.poll()
    assert worker_id not in fleets.fleet.broken(), "it has restarted"


async def test_the_worker_at_an_address_is_the_one_that_answers_there() -> None:
    fleets = static("old")
    await fleets.fleet.poll()
    fleets.states["http://z:8000"] = WorkerState(member("new", url="http://z:8000"), WorkerLoad())
    fleets.clock.now_s += 1.0
    await fleets.fleet.poll()
    assert names(fleets.fleet.candidates("m", None)) == {"new"}


async def test_without_a_lease_the_load_is_what_the_worker_answers() -> None:
    fleets = static(num_running=7)
    await fleets.fleet.poll()
    (candidate,) = fleets.fleet.candidates("m", None)
    assert (candidate.load.num_running, candidate.matched_blocks, candidate.load_age_s) == (7, 0, 0.0)
    fleets.clock.now_s += 2.0
    (candidate,) = fleets.fleet.candidates("m", None)
    assert candidate.load_age_s == 2.0


async def test_a_model_may_exist_until_all_workers_have_answered() -> None:
    fleets = static("z")
    state = fleets.states.pop("http://z:8000")
    assert fleets.fleet.may_have("m")
    await fleets.fleet.poll()
    assert fleets.fleet.may_have("m"), "its worker may be loading"
    fleets.states["http://z:8000"] = state
    fleets.index.away = False
    await fleets.fleet.poll()
    assert fleets.fleet.may_have("m"), "its worker is known, and perhaps not its tokenizer"
    assert not fleets.fleet.may_have("other")
    del fleets.states["http://z:8000"]
    await fleets.fleet.poll()
    assert not fleets.fleet.may_have("other"), "the worker has said what it has"


async def test_a_model_may_exist_until_the_registry_was_read() -> None:
    fleets = Fleets()
    fleets.index.away = True
    await fleets.fleet.poll()
    assert fleets.fleet.may_have("m")
    fleets.index.away = False
    await fleets.fleet.poll()
    assert not fleets.fleet.may_have("m")
    fleets.index.away = True
    await fleets.fleet.poll()
    assert not fleets.fleet.may_have("m")


@pytest.mark.parametrize("code", [socket.EAI_AGAIN, socket.EAI_NONAME])
async def test_a_model_may_exist_until_the_resolver_has_answered(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    found: list[AddressInfo] = []

    async def resolve(host: str, port: int) -> list[AddressInfo]:
        if not found:
            raise socket.gaierror(code, "no name")
        return found

    monkeypatch.setattr(networks, "resolve", resolve)
    fleets = Fleets(workers=("dns:z:8000",))
    await fleets.fleet.poll()
    assert fleets.fleet.may_have("m") == (code == socket.EAI_AGAIN)
    found.append((None, None, 0, "", ("10.0.0.1", 8000)))
    fleets.states["http://10.0.0.1:8000"] = WorkerState(member("z", url="http://10.0.0.1:8000"), WorkerLoad())
    await fleets.fleet.poll()
    assert fleets.fleet.may_have("m")
    assert not fleets.fleet.may_have("other")


async def test_a_draining_worker_is_a_candidate_but_not_live() -> None:
    fleets = static(draining=True)
    await fleets.fleet.poll()
    assert names(fleets.fleet.candidates("m", None)) == {"z"}, "the router says why it is not chosen"
    assert fleets.fleet.live_workers() == []


async def test_only_polls_make_a_worker_silent() -> None:
    """However long the gateway itself stood still."""
    fleets = Fleets()
    fleets.index.register(member("a"))
    fleets.fleet.candidates("m", fleets.index.memory.match([], "m"))
    fleets.clock.now_s += 100.0
    assert names(fleets.fleet.candidates("m", None)) == {"a"}
    await fleets.fleet.poll()
    assert names(fleets.fleet.candidates("m", None)) == {"a"} == fleets.fleet.broken(), "others are preferred"
    await fleets.fleet.poll()
    assert fleets.fleet.candidates("m", None) == []
    assert names(fleets.fleet.silent("m", "n")) == {"a"}
    assert fleets.fleet.known() == [(member("a"), False)]


async def test_a_lease_is_no_answer() -> None:
    """The registry may reach a worker that this gateway cannot."""
    fleets = Fleets()
    fleets.index.register(member("a"))
    await fleets.fleet.poll()
    fleets.fleet.report_failure(WorkerId("a"))
    for _ in range(3):
        await fleets.fleet.poll()
        fleets.clock.now_s += 1.5
        assert names(fleets.fleet.candidates("m", fleets.index.memory.match([], "m"))) == {"a"}
        assert fleets.fleet.broken() == {"a"}
    fleets.states[member("a").url] = WorkerState(member("a"), WorkerLoad())
    await fleets.fleet.poll()
    assert fleets.fleet.broken() == set()


async def test_a_gateway_that_stood_still_forgets_no_worker() -> None:
    """Silence is what polls have seen: ten minutes of it, at a poll a second."""
    fleets = static()
    await fleets.fleet.poll()
    fleets.states["http://z:8000"] = WorkerLost("late")
    for _ in range(3):
        fleets.clock.now_s += 3600.0
        await fleets.fleet.poll()
        fleet = fleets.fleet
        assert names([*fleet.candidates("m", None), *fleet.silent("m", None)]) == {"z"}
    num_polls = 0
    while fleets.fleet.workers():
        fleets.clock.now_s += 1.0
        await fleets.fleet.poll()
        num_polls += 1
    assert FORGET_S - 3 * MAX_POLL_S <= num_polls <= FORGET_S + 1


@pytest.mark.parametrize("absent", [WorkerAbsent("its proof is wrong"), ConnectionRefusedError("nobody listens")])
async def test_a_worker_that_is_not_at_its_address_is_gone(absent: Exception) -> None:
    """Even with a lease, until it answers."""
    fleets = static()
    await fleets.fleet.poll()
    fleets.index.away = False
    fleets.index.register(member("z", url="http://z:8000"))
    fleets.fleet.report_failure(WorkerId("z"))
    state, fleets.states["http://z:8000"] = fleets.states["http://z:8000"], absent  # type: ignore[assignment]
    await fleets.fleet.poll()
    found = fleets.index.memory.match([], "m")
    assert names(found) == {"z"}
    assert fleets.fleet.candidates("m", found) == [] == fleets.fleet.silent("m", "n")
    assert fleets.fleet.known() == [(member("z", url="http://z:8000"), None)]
    fleets.states["http://z:8000"] = state
    await fleets.fleet.poll()
    assert names(fleets.fleet.candidates("m", found)) == {"z"}


async def test_a_draining_worker_that_falls_silent_has_left() -> None:
    fleets = static(draining=True)
    await fleets.fleet.poll()
    del fleets.states["http://z:8000"]
    await fleets.fleet.poll()
    assert fleets.fleet.known() == [(member("z", url="http://z:8000"), False)]
    await fleets.fleet.poll()
    assert fleets.fleet.known() == []


async def test_a_worker_that_changes_its_namespace_has_a_new_revision() -> None:
    fleets = static()
    await fleets.fleet.poll()
    other = member("z", "e2", url="http://z:8000", namespace="other")
    fleets.states["http://z:8000"] = WorkerState(other, WorkerLoad())
    await fleets.fleet.poll()
    assert fleets.fleet.workers() == [other]
    assert fleets.fleet.candidates("m", None, "n") == []
    assert names(fleets.fleet.candidates("m", None, "other")) == names(fleets.fleet.candidates("m", None)) == {"z"}


class SignedFleet:
    """A fleet with a cluster secret and one worker, which answers with its epoch e2; and its registry entry."""

    def __init__(self, workers: tuple[str, ...] = ()) -> None:
        self.clock = Clock()
        self.index = Index(self.clock)
        self.epoch = self.member("e2", 2)
        self.answers = True
        networks = WorkerNetworks(["10.0.0.0/8"])
        self.fleet = Fleet(
            self.index, self.fetch, targets=workers, cluster_secret=b"secret", networks=networks, clock=self.clock
        )

    def member(self, epoch: str, started_ms: int, **changes: object) -> WorkerMember:
        fields: dict[str, object] = {"url": "http://10.0.0.1:8100", "epoch_started_ms": started_ms, **changes}
        return signed(b"secret", member("w", epoch, **fields))

    async def fetch(self, url: str) -> WorkerState:
        if not self.answers or url != self.epoch.url:
            raise WorkerLost("refused")
        return WorkerState(self.epoch, WorkerLoad(num_running=3))

    def epochs(self, found: Sequence[Candidate] | None = ()) -> list[tuple[str, int]]:
        return [(c.member.epoch, c.matched_blocks) for c in self.fleet.candidates("m", found)]

    def leased(self, entry: WorkerMember) -> list[Candidate]:
        return [Candidate(entry, WorkerLoad(), 9)]


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize(
    "entry",
    [
        {"secret_check": ""},
        {"secret_check": "f" * 32},
        {"url": "http://10.6.6.6:8100"},
        {"namespace": "other"},
        {"protocol": 99},
        {"url": "http://169.254.169.254"},
        {"url": "http://10..1:8100"},
    ],
)
async def test_a_forged_entry_displaces_no_worker(static: bool, entry: dict[str, object]) -> None:
    one = SignedFleet(("http://10.0.0.1:8100",) if static else ())
    if not static:
        one.index.register(one.epoch)
    await one.fleet.poll()
    assert one.epochs() == [("e2", 0)]
    forged = member("w", "e9", **{"url": "http://10.0.0.1:8100", "epoch_started_ms": 9, **entry})
    one.index.register(forged)
    for _ in range(20):
        await one.fleet.poll()
        assert one.epochs(one.leased(forged)) == [("e2", 0)]
        one.clock.now_s += 1.0


async def test_an_epoch_older_than_the_confirmed_one_is_ignored() -> None:
    one = SignedFleet(("http://10.0.0.1:8100",))
    await one.fleet.poll()
    assert one.epochs(one.leased(one.member("e1", 1))) == [("e2", 0)]
    assert one.epochs(one.leased(one.epoch)) == [("e2", 9)]
    later = one.member("e3", 3)
    assert one.epochs(one.leased(later)) == [("e3", 9)], "a cleared cache counts at once"


async def test_a_contradicted_epoch_is_ignored_whatever_its_clock_says() -> None:
    one = SignedFleet()
    rolled_back = one.member("e1", 7)
    one.index.register(rolled_back)
    assert one.epochs(one.leased(rolled_back)) == [("e1", 9)], "a genuine entry, and nothing contradicts it"
    one.clock.now_s += 1.0
    one.index.away = True
    await one.fleet.poll()
    assert one.epochs(one.leased(rolled_back)) == [("e2", 0)]


async def test_a_refused_epoch_makes_the_fleet_ask_a_leased_worker() -> None:
    one = SignedFleet()
    rolled_back = one.member("e1", 7)
    one.index.register(rolled_back)
    one.index.lookup = lambda hashes, model=None: answered(one.leased(rolled_back))  # type: ignore[method-assign]
    await one.fleet.poll()
    assert one.epochs(one.leased(rolled_back)) == [("e1", 9)]
    one.fleet.report_wrong_epoch(one.member("e0", 0))
    assert rolled_back.worker_id not in one.fleet.broken(), "a request for an epoch that is over says nothing"
    one.fleet.report_wrong_epoch(rolled_back)
    assert rolled_back.worker_id in one.fleet.broken()
    await one.fleet.poll()
    assert one.epochs(one.leased(rolled_back)) == [("e2", 0)]
    assert rolled_back.worker_id not in one.fleet.broken()


async def answered(found: list[Candidate]) -> list[Candidate]:
    return found


async def test_workers_are_asked_a_few_at_a_time() -> None:
    fleets = Fleets()
    asking, most = 0, 0

    async def fetch(url: str) -> WorkerState:
        nonlocal asking, most
        asking += 1
        most = max(most, asking)
        await asyncio.sleep(0)
        asking -= 1
        raise WorkerLost("refused")

    fleets.fleet._fetch_state = fetch
    fleets.index.members = lambda: [member(f"w{n}") for n in range(500)]  # type: ignore[method-assign]
    await fleets.fleet.poll()
    assert 1 < most <= 64


async def test_a_member_without_a_lease_is_an_address_to_ask() -> None:
    one = SignedFleet()
    one.index.members = lambda: [one.member("e1", 1), one.epoch]  # type: ignore[method-assign]
    await one.fleet.poll()
    assert one.epochs() == [("e2", 0)], "as the worker itself says"
    one.answers = False
    other = SignedFleet()
    other.answers = False
    other.index.members = lambda: [other.epoch]  # type: ignore[method-assign]
    await other.fleet.poll()
    assert other.epochs() == []


async def test_an_error_at_one_worker_hides_no_other() -> None:
    fleets = static()
    real = fleets.fleet._fetch_state

    async def fetch(url: str) -> WorkerState:
        if "odd" in url:
            raise UnicodeError("label empty or too long")
        return await real(url)

    fleets.fleet._fetch_state = fetch
    fleets.index.away = False
    fleets.index.registered["odd"] = member("odd", url="http://odd:1")
    await fleets.fleet.poll()
    assert names(fleets.fleet.candidates("m", None)) == {"z"}


@pytest.mark.parametrize("target", ["foo", "ftp://x", "dns:name", "dns::80", "http://"])
def test_an_unusable_workers_argument_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match="--workers"):
        Fleets(workers=(target,))


@asynccontextmanager
async def opened_client() -> AsyncIterator[WorkerClient]:
    client = WorkerClient()
    try:
        yield client
    finally:
        client.close()


@pytest.mark.parametrize("cuts", [[1], [100], [50, 51, 52]])
async def test_a_state_may_come_in_parts(cuts: list[int]) -> None:
    state = WorkerState(member("w"), WorkerLoad({f"g{n}": 1.0 for n in range(40)}))  # type: ignore[misc]
    body = pack(state)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body))
        for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
            writer.write(body[start:end])
            await writer.drain()
            await asyncio.sleep(0.02)  # a segment of its own

    async with listening(answer) as port, opened_client() as client:
        assert await client.state(f"http://127.0.0.1:{port}") == state


async def test_a_state_without_end_is_refused() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + bytes(1 << 20))
        await reader.read()

    async with listening(answer) as port, opened_client() as client:
        with pytest.raises(WorkerLost, match="more than"):
            await client.state(f"http://127.0.0.1:{port}")
