"""Whatever Redis answers, in whatever order and number: nothing ends, and the index is back when it is over.

A proxy pairs each reply of a real Redis with its command. It serves both sides: the gateway's (startup, registry,
lookup, script, probe, TIME) and a publisher's (startup, clock, fill, MULTI, EXEC, prune, retire).
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
import redis

from cache.records import WorkerLoad, WorkerState
from server.workers.client import WorkerClient
from tests.fuzz.harness import CASE, LOOPS, run_cases, within
from tests.fuzz.redis_proxy import ACTS, IDLE, Fault, Proxy
from tests.fuzz.resp import random_data
from tests.fuzz.rig import BACK_S, MODEL, SECRET, Gateway, Parts, Worker, chain, keys_of, member, worker_client
from tests.redis_server import RedisServer, redis_binaries

NUM_CASES: Final = 1000
NUM_DEEP_CASES: Final = 50_000
NUM_LANES: Final = 48
"""Many, because most of a case is waiting: for a reply that does not come, for a new connection."""
GATEWAY_STATES: Final = {
    "startup": ("AUTH", "SELECT"),
    "sizes": ("HLEN", "MEMORY"),
    "registry": ("HGETALL", "HGETALL", "TIME"),
    "lookup": ("EVALSHA_RO", "EVALSHA"),
    "script": ("SCRIPT",),
    "entries": ("HGETALL", "TIME"),
    "probe": ("EVALSHA_RO", "EVALSHA"),
    "idle": (IDLE,),
    "any": ("*",),
}
PUBLISHER_STATES: Final = {
    "startup": ("AUTH", "SELECT"),
    "publish": ("MULTI", "HGET", "HEXISTS", "SADD", "SREM", "PEXPIRE", "HSET", "SCARD", "TIME", "EXEC", "EXEC", "EXEC"),
    "rewrite": ("TIME", "SADD", "PEXPIRE", "MULTI", "HSET", "SET", "UNLINK", "SCARD", "EXEC", "EXEC"),
    "prune": ("HGETALL", "TIME"),
    "tidy": ("HLEN", "MEMORY"),
    "retire": ("HGET", "MULTI", "HDEL", "EXEC"),
    "idle": (IDLE,),
    "any": ("*",),
}
MUST_REACH: Final = (
    *(f"gateway {state}" for state in GATEWAY_STATES),
    *(f"publisher {state}" for state in PUBLISHER_STATES),
    *(f"act {act}" for act in ACTS),
    *(f"gateway counts {event}" for event in ("invalid", "timeout", "down", "skipped", "breaker_opened")),
    *(f"publisher counts {event}" for event in ("invalid", "refused", "rewritten")),
)
"""Actions that every run must take at least once."""
_numbers = count()
_reached: Counter[str] = Counter()
"""By all runs of this process."""


@pytest.fixture(scope="module", params=sorted(redis_binaries()))
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder), redis_binaries()[request.param]) as running:
        running.command("ACL", "SETUSER", "fuzz", "on", ">pw", "~*", "&*", "+@all")
        yield running


class RepliesLane:
    """One publisher and one gateway, each behind a proxy of its own."""

    def __init__(
        self, server: RedisServer, folder: Path, number: int, client: WorkerClient, reached: Counter[str]
    ) -> None:
        """`reached` counts the states in which a fault has acted, and what was counted by either side."""
        self.notes: list[str] = []
        self.reached = reached
        self.secret = SECRET if number % 2 else b""
        self.prefix = f"replies-{next(_numbers)}"
        self.keys = keys_of(self.prefix)
        self.store = redis.Redis(unix_socket_path=str(server.socket), db=1)
        self.read, self.write = (Proxy(server.socket, folder / f"{self.prefix}-{side}") for side in "rw")
        own = member("w0", "http://127.0.0.1:1", tiers=("host", "disk")[: number % 3])
        self.worker = Worker(self._url(self.write), self.prefix, self.secret, own)
        self.gateway = Gateway(self._url(self.read), self.prefix, self.secret, self._fetch, client, ())
        self.parts = Parts()
        self.rng = random.Random(number)

    @staticmethod
    def _url(proxy: Proxy) -> str:
        return f"unix://fuzz:pw@{proxy.path}?db=1"

    async def _fetch(self, url: str) -> WorkerState:
        return WorkerState(self.worker.member, WorkerLoad())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[RepliesLane]:
        async with self.read.listening(), self.write.listening():
            try:
                self._begin()
                self.parts.add("the index", self.gateway.index.run())
                await self._back()
                await self.gateway.fleet.poll()
                yield self
            finally:
                for side, counts in (("gateway", self.gateway.counts), ("publisher", self.worker.counts)):
                    self.reached.update({f"{side} counts {event}": number for event, number in counts.items()})
                await self.parts.stop()
                self.gateway.executor.shutdown(wait=False)
                self.store.close()

    def _begin(self) -> None:
        self.worker.begin(chain(self.rng, 20))
        self.parts.add("the publisher", self.worker.publishing.publisher.run())

    # --- a case -----------------------------------------------------------------------------------------------------

    async def case(self, rng: random.Random) -> None:
        is_gateway = rng.random() < 0.5
        proxy, states = (self.read, GATEWAY_STATES) if is_gateway else (self.write, PUBLISHER_STATES)
        state = rng.choice(sorted(states))
        command = rng.choice(states[state])
        act = rng.choice([*ACTS, "replace", "replace", "change", "change", "before", "after", "after"])
        if command == IDLE:
            act = rng.choice(["before", "before", "cut"])
        times = rng.choice([1, 1, 1, 1, 2, 5, 1000])
        faults = [Fault(command, act, random_data(rng), times, rng.randrange(2**32))]
        if state == "script":
            for name in ("EVALSHA_RO", "EVALSHA"):
                faults.append(Fault(name, "replace", b"-NOSCRIPT No matching script.\r\n", rng.choice([1, 1, 3])))
        if state == "probe":
            faults[:0] = [Fault(name, "replace", b"-ERR x\r\n", 4) for name in ("EVALSHA_RO", "EVALSHA")]
        if rng.random() < 0.15:
            faults.append(Fault("*", rng.choice(ACTS), random_data(rng), 1, rng.randrange(2**32)))
        side = "gateway" if is_gateway else "publisher"
        self.notes.append(f"{side}, {state}")
        self.notes += [str(fault) for fault in faults]
        proxy.hit.clear()
        proxy.faults = faults
        try:
            await (self._read(state, rng) if is_gateway else self._publish(state, rng))
        finally:
            proxy.faults = []
        num_hit = proxy.hit.total() if command == "*" else proxy.hit[command]
        self.reached.update({f"{side} {state}": num_hit, f"act {act}": num_hit})
        self.parts.check()
        await self._back()
        await self.gateway.fleet.poll()
        await self.gateway.decide(self.worker.held)

    async def _read(self, state: str, rng: random.Random) -> None:
        gateway, held = self.gateway, self.worker.held
        if state == "startup":
            self.read.cut()
        if state in ("sizes", "registry") or rng.random() < 0.3:
            self.store.set(self.keys.version, rng.randbytes(8))
        await asyncio.sleep(rng.choice([0, 0, 0.03]))
        self.read.act_idle()
        for _ in range(2):
            await asyncio.gather(
                *(gateway.lookup(held, model) for model in [MODEL, None, "x"][: rng.choice([1, 1, 3])])
            )
        if state == "entries" or rng.random() < 0.2:
            await gateway.report()
        await asyncio.gather(gateway.fleet.poll(), gateway.lookup(held, MODEL))
        await gateway.decide(held)
        if state in ("startup", "probe"):
            await asyncio.sleep(0.1)

    async def _publish(self, state: str, rng: random.Random) -> None:
        worker = self.worker
        if state == "startup":
            self.write.cut()
        if state == "rewrite":
            self.store.delete(rng.choice(worker.publishing.publisher._writer._set_keys))
        if len(worker.held) > 10 and rng.random() < 0.5:
            worker.change(num_removed=rng.randrange(1, 4))
        else:
            worker.change(chain(rng, rng.randrange(1, 20)))
        if state == "retire":
            closing = asyncio.create_task(worker.publishing.publisher.close())
            try:
                await self.parts.ended("the publisher", BACK_S)
            finally:
                closing.cancel()
            self.write.faults = []
            self._begin()
            return
        for _ in range(rng.choice([1, 3, 10])):
            await asyncio.sleep(0.004)
            self.write.act_idle()
            worker.change()

    async def _back(self) -> None:
        seen: dict[str, int] | None = {}

        async def back() -> bool:
            nonlocal seen
            self.parts.check()
            self.worker.change()
            found = await self.gateway.lookup(self.worker.held)
            seen = None if found is None else {c.member.worker_id: c.matched_blocks for c in found}
            return seen == {"w0": len(self.worker.held)} and self.worker.stands(self.store)

        await within(
            BACK_S,
            back,
            lambda: (
                f"the index is not back: lookup {seen}, of {len(self.worker.held)}; the set stands: "
                f"{self.worker.stands(self.store)}"
            ),
        )


async def test_nothing_is_reserved_for_a_reply_that_says_it_is_huge(server: RedisServer, tmp_path: Path) -> None:
    """Thirteen bytes can announce 10^9 elements: the parser must not make a list of them."""
    process = psutil.Process()
    async with worker_client() as client, RepliesLane(server, tmp_path, 0, client, Counter()).running() as lane:
        for data in (b"*1000000000\r\n", b"~1000000000\r\n", b"*1\r\n*1000000000\r\n", b"$9999999999\r\n"):
            before = process.memory_info().vms
            lane.read.faults = [Fault(IDLE, "before", data)]
            lane.read.act_idle()
            for _ in range(20):
                await asyncio.sleep(0.005)
                grown = process.memory_info().vms - before
                assert grown < 1 << 30, f"{data!r}: {grown >> 20} MiB"
            await lane._back()


async def _run(server: RedisServer, folder: Path, num_cases: int) -> None:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(worker_client())
        reached: Counter[str] = Counter()

        def lane(number: int) -> Any:
            return RepliesLane(server, folder, number, client, reached).running()

        failures = await run_cases(lane, num_cases, NUM_LANES)
    failures.check()
    _reached.update(reached)


@pytest.mark.parametrize("num_cases", [NUM_CASES, pytest.param(NUM_DEEP_CASES, marks=pytest.mark.deep)])
@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_no_reply_ends_anything(server: RedisServer, loop: str, num_cases: int) -> None:
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(_run(server, Path(folder), num_cases // 2 // len(redis_binaries())))


def test_every_state_and_act_was_reached() -> None:
    if CASE is not None or not _reached:
        pytest.skip("the runs above were not all of them")
    missed = [what for what in MUST_REACH if not _reached[what]]
    assert not missed, f"no fault came to {missed}: {_reached}"
