"""The Redis index equals the in-memory model, whatever happens to workers, connections and the server's data."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from benchmarks.dev.simulation.memory_index import MemoryIndex
from cache.events import BlockEvent, Removed, Stored
from cache.hashing import hash_chain, index_entry
from cache.records import Candidate, WorkerLoad, WorkerMember
from cache.redis_index import IndexWriter, ReaderSettings, RedisIndex, WriterSettings
from cache.types import BlockHash, Tier, WorkerId
from tests.members import make_member
from tests.redis_server import RedisServer
from tests.running import running
from tests.waiting import HANG_S, until
from worker.publishing.inbox import PublisherInbox
from worker.publishing.publisher import Publisher, PublisherSettings

T = TypeVar("T")
Seen = tuple[str, str, int, tuple[int, ...], int]
ROOT = BlockHash(b"r" * 16)
SHARED = 4
LENGTH = 12
CHAINS = [hash_chain(ROOT, [*range(SHARED), *range(100 * n, 100 * n + LENGTH - SHARED)], 1) for n in (1, 2, 3)]
WORKERS = [WorkerId(f"w{n}") for n in range(3)]
TIERS: dict[WorkerId, tuple[Tier, ...]] = {WORKERS[0]: (), WORKERS[1]: ("disk",), WORKERS[2]: ("host", "disk")}
FIRST = {None: 0, "host": 2, "disk": 0}
EPOCHS = count()
LOAD = WorkerLoad(num_running=1)


def new_member(worker_id: WorkerId) -> WorkerMember:
    return make_member(worker_id, f"e{next(EPOCHS)}", url="http://127.0.0.1:1", tiers=TIERS[worker_id])


class SimulatedWorker:
    """Its pool and tiers hold a prefix of each chain, from `FIRST` on. The rounds of its publisher come when asked."""

    def __init__(self, url: str, worker_id: WorkerId) -> None:
        self.member = new_member(worker_id)
        writing = WriterSettings(timeout_s=HANG_S, lease_s=600.0, chunk=5, chunks_in_flight=2)
        settings, self.counted = PublisherSettings(rewrite_s=0.0), list[str]()
        self.publisher = Publisher(
            url, self.member, PublisherInbox(), settings=settings, writer_settings=writing, count=self.counted.append
        )
        self.publisher.inbox.offer([], LOAD)
        self.writer = self.publisher._writer
        self.task = asyncio.get_running_loop().create_task(self.writer.run())
        self.depths = self._nothing()

    def _nothing(self) -> dict[Tier | None, list[int]]:
        return {place: [0] * len(CHAINS) for place in (None, *self.member.tiers)}

    def purge(self) -> None:
        self.member = new_member(self.member.worker_id)
        self.depths = self._nothing()
        self.publisher.inbox.begin_epoch(self.member)

    def held(self, place: Tier | None) -> set[BlockHash]:
        depths = zip(CHAINS, self.depths[place], strict=True)
        return {block for chain, depth in depths for block in chain[FIRST[place] : depth]}

    def hold(self, place: Tier | None, chain: int, depth: int) -> None:
        before = self.held(place)
        self.depths[place][chain] = depth
        after = self.held(place)
        events: list[BlockEvent] = [Removed(block) for block in reversed(CHAINS[chain]) if block in before - after]
        events += [Stored(block) for block in CHAINS[chain] if block in after - before]
        if place is None:
            self.publisher.inbox.offer(events, LOAD)
        else:
            self.publisher.inbox.offer_tier(place, events)

    async def publish(self) -> bool:
        has_published = await self.publisher._round()
        assert "failed" not in self.counted
        return has_published

    async def settle(self) -> None:
        """Publish heartbeats, as a publisher does at intervals, until one stands."""

        async def stands() -> bool:
            return await self.publish() and not self.writer.in_doubt

        await until(stands)

    async def stop(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


class IndexMachine(RuleBasedStateMachine):
    server: RedisServer

    def __init__(self) -> None:
        super().__init__()
        self.server.command("FLUSHALL")
        self.runner = asyncio.Runner()
        self.model = MemoryIndex(lambda: 0.0)
        self.lapsed: set[WorkerId] = set()
        self.run(self._start())

    def run(self, step: Awaitable[T]) -> T:
        async def wrapped() -> T:
            return await step

        return self.runner.run(wrapped())

    async def _start(self) -> None:
        self.index = RedisIndex(self.server.url, ReaderSettings(poll_s=30.0, refresh_interval_s=0.0, deadline_s=HANG_S))
        self.index_task = asyncio.get_running_loop().create_task(self.index.run())
        self.workers = {worker_id: SimulatedWorker(self.server.url, worker_id) for worker_id in WORKERS}
        for worker_id in WORKERS:
            self._remember(worker_id)

    def teardown(self) -> None:
        async def stop() -> None:
            self.index_task.cancel()
            with suppress(asyncio.CancelledError):
                await self.index_task
            for worker in self.workers.values():
                await worker.stop()

        self.run(stop())
        self.runner.close()

    def _remember(self, worker_id: WorkerId) -> None:
        worker = self.workers[worker_id]
        below = {tier: worker.held(tier) for tier in worker.member.tiers}
        self.model.register(worker.member, worker.held(None), LOAD, below)

    @rule(worker_id=st.sampled_from(WORKERS), chain=st.integers(0, len(CHAINS) - 1), depth=st.integers(0, LENGTH))
    def hold(self, worker_id: WorkerId, chain: int, depth: int) -> None:
        self.workers[worker_id].hold(None, chain, depth)
        self._remember(worker_id)

    @rule(
        place=st.sampled_from([(worker_id, tier) for worker_id in WORKERS for tier in TIERS[worker_id]]),
        chain=st.integers(0, len(CHAINS) - 1),
        depth=st.integers(0, LENGTH),
    )
    def hold_in_a_tier(self, place: tuple[WorkerId, Tier], chain: int, depth: int) -> None:
        worker_id, tier = place
        self.workers[worker_id].hold(tier, chain, depth)
        self._remember(worker_id)

    @rule(worker_id=st.sampled_from(WORKERS))
    def restart(self, worker_id: WorkerId) -> None:
        """Start a new process under the old id. Redis does not learn of the old one's death."""

        async def restart() -> None:
            await self.workers[worker_id].stop()
            self.workers[worker_id] = SimulatedWorker(self.server.url, worker_id)

        self.run(restart())
        self.lapsed.discard(worker_id)
        self._remember(worker_id)

    @rule(worker_id=st.sampled_from(WORKERS))
    def purge(self, worker_id: WorkerId) -> None:
        self.workers[worker_id].purge()
        self._remember(worker_id)

    @rule()
    def flush(self) -> None:
        self.server.command("FLUSHALL")

    @rule()
    def forget_scripts(self) -> None:
        self.server.command("SCRIPT", "FLUSH")

    @rule()
    def cut_connections(self) -> None:
        self.server.command("CLIENT", "KILL", "TYPE", "normal")

    @rule(worker_id=st.sampled_from(WORKERS), entry=st.sampled_from([b for chain in CHAINS for b in chain]))
    def lose_an_entry(self, worker_id: WorkerId, entry: BlockHash) -> None:
        """Lose the last writes, as a failover to a late replica does."""
        for key in self._sets(worker_id):
            self.server.command("SREM", key, index_entry(entry))

    @rule(worker_id=st.sampled_from(WORKERS), chain=st.sampled_from(CHAINS))
    def repeat_a_batch(self, worker_id: WorkerId, chain: list[BlockHash]) -> None:
        """Write to an old version, as a late command of an old connection does."""
        for key in self._sets(worker_id):
            self.server.command("SADD", key, *(index_entry(block) for block in chain))

    @rule(worker_id=st.sampled_from(WORKERS), member=st.sampled_from(["members", "states"]))
    def lose_a_record(self, worker_id: WorkerId, member: str) -> None:
        self.server.command("HDEL", f"{{headstart:0}}:{member}", worker_id)

    @rule(worker_id=st.sampled_from(WORKERS))
    def lapse(self, worker_id: WorkerId) -> None:
        """End a lease by Redis' clock: publish an expired one, then stop."""

        async def publish_and_stop() -> None:
            worker = self.workers[worker_id]
            worker.writer._settings = replace(worker.writer._settings, lease_s=600.0)
            await worker.settle()
            worker.writer._settings = replace(worker.writer._settings, lease_s=0.0)
            await worker.publish()
            await asyncio.sleep(0.002)

        self.run(publish_and_stop())
        self.lapsed.add(worker_id)

    @rule(worker_id=st.sampled_from(WORKERS))
    def resume(self, worker_id: WorkerId) -> None:
        writer = self.workers[worker_id].writer
        writer._settings = replace(writer._settings, lease_s=600.0)
        self.lapsed.discard(worker_id)

    def _sets(self, worker_id: WorkerId) -> Iterator[bytes]:
        reply = self.server.command("KEYS", f"{{headstart:0}}:b:{worker_id}:*")
        return (line for line in reply.split(b"\r\n") if line.startswith(b"{headstart"))

    @invariant()
    def lookups_equal_the_model(self) -> None:
        self.run(self._compare())

    async def _compare(self) -> None:
        for worker_id in set(WORKERS) - self.lapsed:
            await self.workers[worker_id].settle()
        for chain in CHAINS:
            expected = _seen(c for c in self.model.match(chain) if c.member.worker_id not in self.lapsed)

            async def equal(chain: list[BlockHash] = chain, expected: set[Seen] = expected) -> bool:
                found = await self.index.lookup(chain)
                return found is not None and _seen(found) == expected

            await until(equal)


def _seen(candidates: Iterable[Candidate]) -> set[Seen]:
    return {
        (c.member.worker_id, c.member.epoch, c.matched_blocks, c.tier_blocks, c.load.num_running) for c in candidates
    }


@pytest.fixture
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients whose connections are cut connect again soon, however often that happens."""
    monkeypatch.setattr("cache.redis_index.client.random", SimpleNamespace(uniform=lambda low, high: 0.01))


@pytest.mark.usefixtures("no_backoff")
@pytest.mark.parametrize(("num_runs", "num_steps"), [(8, 15), pytest.param(300, 40, marks=pytest.mark.deep)])
def test_the_redis_index_equals_the_model(redis_server: RedisServer, num_runs: int, num_steps: int) -> None:
    machine = type("Machine", (IndexMachine,), {"server": redis_server})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_runs,
            stateful_step_count=num_steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("skew_s", [-600.0, 600.0])
async def test_leases_hold_with_a_host_clock_off_by_ten_minutes(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, skew_s: float
) -> None:
    """Neither the worker's clock nor the gateway's is compared with Redis': only Redis' own time counts."""
    skewed = SimpleNamespace(monotonic=lambda: time.monotonic() + skew_s, time=lambda: time.time() + skew_s)
    monkeypatch.setattr("cache.redis_index.writer.time", skewed)
    writer = IndexWriter(redis_server.url, new_member(WorkerId("w0")), WriterSettings(timeout_s=HANG_S, lease_s=60.0))
    index = RedisIndex(redis_server.url, ReaderSettings(poll_s=0.02, refresh_interval_s=0.0, deadline_s=HANG_S))
    async with running(writer, index):
        await until(lambda: writer.client.up and index.health()[0]["connected"])
        assert await writer.rewrite([], WorkerLoad())

        async def alive() -> bool:
            return bool(await index.lookup([]))

        async def lapsed() -> bool:
            return await index.lookup([]) == []

        await until(alive)
        assert 0.0 < (await index.entries())[0].lease_left_s <= 60.0
        writer._settings = WriterSettings(timeout_s=HANG_S, lease_s=0.0)
        assert await writer.rewrite([], WorkerLoad())
        await until(lapsed)
        assert index.members() == [writer.member], "a lapsed member stays known"
