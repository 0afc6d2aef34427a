"""Revisions of a model side by side: a model with a living worker is served, whatever its workers do."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cache.records import WorkerLoad, WorkerMember, WorkerState
from server.config import GatewayConfig
from server.errors import UnavailableError
from server.models import registry
from server.models.registry import Models
from server.models.served_model import ServedModel, build_model
from server.workers.client import WorkerClient
from server.workers.connection import WorkerAbsent, WorkerLost
from tests.members import make_member
from tests.server.conftest import bundle_of, trained_tokenizer
from tests.server.router.fleets import Fleets
from tests.waiting import until
from worker.wire import TokenizerBundle

LEASE_S = 5.0
REVISIONS = ("r1", "r2", "r3")
URLS = tuple(f"http://w{number}:8000" for number in range(4))
BUILT: dict[str, ServedModel] = {}
BUNDLES = {revision: bundle_of(trained_tokenizer(), revision=revision) for revision in REVISIONS}


@dataclass
class Simulated:
    """A worker as it really is."""

    member: WorkerMember
    state: str = "up"
    """up, draining, silent (it will come back), dead, or broken (its bundle is unusable)."""
    misses: int = 0
    """Polls that it will answer too late."""
    is_late: bool = False
    """It answered the last poll too late."""

    @property
    def load(self) -> WorkerLoad:
        return WorkerLoad(draining=self.state == "draining")


class Bundles(WorkerClient):
    """Serves the bundle of the worker at a URL."""

    def __init__(self, workers: dict[str, Simulated]) -> None:
        self._workers = workers

    async def bundle(self, url: str) -> TokenizerBundle:
        worker = self._workers[url]
        if worker.state == "broken":
            raise WorkerLost("it breaks off")
        return next(each for each in BUNDLES.values() if each.namespace.fingerprint == worker.member.namespace)


class World(Fleets):
    """A fleet whose workers answer as they really are."""

    def __init__(self, targets: tuple[str, ...], *, has_registry: bool) -> None:
        super().__init__(workers=targets)
        self.workers: dict[str, Simulated] = {}
        self.targets = targets
        self.has_registry = has_registry
        self.index.away = not has_registry

    async def fetch(self, url: str) -> WorkerState:
        worker = self.workers.get(url)
        if worker is None or worker.state == "dead":
            raise WorkerAbsent("nobody listens") from ConnectionRefusedError()
        worker.is_late = worker.misses > 0 or worker.state == "silent"
        if worker.is_late:
            worker.misses = max(0, worker.misses - 1)
            raise WorkerLost("late")
        return WorkerState(worker.member, worker.load)

    def publish(self) -> None:
        """Renew the leases of the workers that run."""
        for worker in self.workers.values():
            if worker.state in ("up", "draining", "broken"):
                self.index.register(worker.member, load=worker.load)


def build_once(bundle: TokenizerBundle, executor: ThreadPoolExecutor, config: GatewayConfig) -> ServedModel:
    if bundle.revision not in BUILT:
        BUILT[bundle.revision] = build_model(bundle, executor, config)
    return BUILT[bundle.revision]


class Revisions(RuleBasedStateMachine):
    """A gateway's fleet and models over workers that join, leave, fall silent and die, in any revision."""

    def __init__(self) -> None:
        super().__init__()
        self.runner, self.executor = asyncio.Runner(), ThreadPoolExecutor(1)
        self.num_started = 0
        self.is_settled = self.was_known = False

    @initialize(is_static=st.booleans(), has_registry=st.booleans())
    def begin(self, is_static: bool, has_registry: bool) -> None:
        self.world = World(URLS if is_static or not has_registry else (), has_registry=has_registry)
        self.fleet, self.index = self.world.fleet, self.world.index
        config = GatewayConfig(workers=URLS)
        self.models = Models(Bundles(self.world.workers), self.executor, config, self.fleet.may_have)
        self.following = self.runner.get_loop().create_task(self.models.follow(self.fleet.known, 0.0))

    def teardown(self) -> None:
        try:
            if self.num_started:
                self.settle()
                self.check()
        finally:
            self.runner.close()
            self.executor.shutdown()

    def check(self) -> None:
        self.a_living_worker_is_served()
        self.revisions_without_workers_are_forgotten()
        self.what_is_not_heard_is_not_unknown()

    # --- what happens to workers -------------------------------------------------------------------------------------

    @rule(url=st.sampled_from(URLS), revision=st.sampled_from(REVISIONS), broken=st.sampled_from([False] * 5 + [True]))
    def start(self, url: str, revision: str, broken: bool) -> None:
        """A process starts at the address, and replaces the one that was there."""
        self.num_started += 1
        member = make_member(
            url[7:9],
            f"e{self.num_started}",
            url=url,
            model="tiny",
            namespace=BUNDLES[revision].namespace.fingerprint,
            epoch_started_ms=self.num_started,
            aliases=(f"e{self.num_started}",),
        )
        self.world.workers[url] = Simulated(member, "broken" if broken else "up")
        self.index.registered[member.worker_id] = member
        self.index.register(member)
        self.is_settled = False

    @rule(url=st.sampled_from(URLS), state=st.sampled_from(["draining", "silent", "dead", "dead", "up"]))
    def become(self, url: str, state: str) -> None:
        worker = self.world.workers.get(url)
        if worker is None or worker.state == "dead":
            return
        if worker.state == "broken" or (worker.state == "draining" and state != "dead"):  # both are permanent
            return
        worker.state = state
        self.is_settled = False

    @rule(url=st.sampled_from(URLS))
    def leave(self, url: str) -> None:
        """A worker leaves in good order: it takes its entry along. The next look is enough."""
        worker = self.world.workers.get(url)
        if worker is None or worker.state == "dead":
            return
        self.index.memory.retire(worker.member.worker_id)
        self.index.registered.pop(worker.member.worker_id, None)
        worker.state, was_settled = "dead", self.is_settled
        self.poll()
        self.is_settled = was_settled

    @rule(url=st.sampled_from(URLS))
    def answer_late(self, url: str) -> None:
        """One answer is late, after one that was not: nothing changes."""
        worker = self.world.workers.get(url)
        if worker is not None and not worker.is_late:
            worker.misses = 1

    @precondition(lambda self: self.world.has_registry)
    @rule(away=st.booleans())
    def lose_registry(self, away: bool) -> None:
        self.index.away = away
        self.is_settled = False

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0, 700.0]))
    def stand_still(self, seconds: float) -> None:
        """The clock goes on, and this gateway's loop does not; workers still renew their leases."""
        self.world.clock.now_s += seconds
        self.world.publish()

    # --- what the gateway does ---------------------------------------------------------------------------------------

    @rule()
    def poll(self) -> None:
        self.world.clock.now_s += 1.0
        self.world.publish()
        self.runner.run(self._follow())

    @rule()
    def settle(self) -> None:
        """All leases of the dead and the silent have lapsed, and the gateway has looked often enough."""
        for _ in range(int(LEASE_S) + 3):
            self.poll()
        self.is_settled = True

    async def _follow(self) -> None:
        await self.fleet.poll()
        await until(lambda: not any(ready and self.models._is_new(each) for each, ready in self.fleet.known()))
        for _ in range(3):  # turns of the task that follows
            await asyncio.sleep(0)
        assert not self.following.done()

    # --- what holds --------------------------------------------------------------------------------------------------

    def expected(self) -> str | None:
        """The revision with most workers that take requests; of equal ones the youngest; None: there is none."""
        learnt = {namespace for _, namespace in self.models._revisions}
        workers = self.world.workers.values()
        taking = [
            w.member for w in workers if w.state == "up" or (w.state == "broken" and w.member.namespace in learnt)
        ]
        names = {each.namespace for each in taking} or {""}
        counts = {name: [m.epoch_started_ms for m in taking if m.namespace == name] for name in names}
        best = max(counts, key=lambda name: (len(counts[name]), min(counts[name], default=0)))
        return best or None

    @invariant()
    def a_living_worker_is_served(self) -> None:
        if not self.is_settled or (self.index.away and not self.world.targets):
            return
        if (want := self.expected()) is None:
            return
        served = self.models.get("tiny")
        assert served.fingerprint == want
        workers = [each for each in self.world.workers.values() if each.state == "up" and each.member.namespace == want]
        assert served.facts.aliases.issuperset(name for each in workers for name in each.member.aliases)
        found = None if self.index.away else self.index.memory.match([], "tiny")
        assert self.fleet.candidates("tiny", found, served.fingerprint)

    @invariant()
    def a_model_that_was_learnt_is_never_unknown(self) -> None:
        known = bool(self.models.names())
        assert known >= self.was_known
        self.was_known = known
        if self.fleet.workers():
            try:
                self.models.get("tiny")
            except UnavailableError:
                assert not known

    @invariant()
    def what_is_not_heard_is_not_unknown(self) -> None:
        """A worker that was seen, and still runs, is a candidate or one to wait for."""
        found = None if self.index.away else self.index.memory.match([], "tiny")
        known = {member.epoch for member in self.fleet.workers()}
        heard = {each.member.epoch for each in self.fleet.candidates("tiny", found)}
        waited = {each.member.epoch for each in self.fleet.silent("tiny", None)}
        running = {
            each.member.epoch for each in self.world.workers.values() if each.state in ("up", "silent", "broken")
        }
        assert running & known <= heard | waited

    @invariant()
    def revisions_without_workers_are_forgotten(self) -> None:
        if not self.is_settled:
            return
        workers = self.world.workers
        running = {each.member.namespace for each in workers.values() if each.state != "dead"}
        # A gateway cannot learn that a silent process has replaced another one.
        running |= {each.namespace for each in self.fleet.workers() if workers[each.url].state == "silent"}
        served = {model.fingerprint for _, model in self.models.names()}
        assert {namespace for _, namespace in self.models._revisions} <= running | served


@pytest.fixture(autouse=True)
def built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "build_model", build_once)


def test_a_model_with_a_living_worker_is_served() -> None:
    options = settings(max_examples=60, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(Revisions, settings=options)


@pytest.mark.deep
def test_a_model_with_a_living_worker_is_served_in_long_runs() -> None:
    options = settings(max_examples=1500, stateful_step_count=60, deadline=None)
    run_state_machine_as_test(Revisions, settings=options)
