"""Whatever stands in Redis, and whatever a registered address answers: nothing ends, and the healthy are served.

Every key that gateways and workers read gets values of every kind. Two real publishers run next to a real gateway's
index, fleet, router and models. A worker whose entries were not touched stays a candidate all the time. With a cluster
secret this holds for all workers. Ignored values are counted, and afterwards the index is as before.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest
import redis

from cache.records import WorkerLoad, WorkerMember, WorkerState, signed
from cache.redis_index import lookup, schema
from cache.redis_index.connection import ClientSettings
from server.workers import client as workers_client
from server.workers import connection, fleet
from server.workers.client import GenerateStream, WorkerClient
from server.workers.connection import WorkerError
from tests.fuzz import garbage
from tests.fuzz.answers import Answers
from tests.fuzz.harness import LOOPS, run_cases, within
from tests.fuzz.rig import (
    BACK_S,
    BUNDLE,
    MODEL,
    NUM_BLOCKS,
    SECRET,
    Gateway,
    Parts,
    Worker,
    chain,
    keys_of,
    member,
    record_of,
    worker_client,
)
from tests.redis_server import RedisServer, redis_binaries
from tests.waiting import HANG_S
from worker.wire import ChoiceState, GenerateRequest, SamplingParams, TokenizerBundle, pack

NUM_CASES: Final = 1000
NUM_DEEP_CASES: Final = 50_000
NUM_LANES: Final = 8
HASH_TYPES: Final = ("string", "set", "list", "zset", "stream")
LEASE_S: Final = 600.0
_numbers = count()


@pytest.fixture(autouse=True)
def longer_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis and both workers live, so a late answer is the machine's fault: nothing gives up on it."""
    monkeypatch.setattr(lookup, "_TIMEOUT_S", HANG_S)
    monkeypatch.setattr(lookup, "ClientSettings", partial(ClientSettings, stall_s=HANG_S))
    monkeypatch.setattr(fleet, "MAX_MISSED", sys.maxsize)
    monkeypatch.setattr(workers_client, "PROBE_TIMEOUT_S", HANG_S)
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT_S", HANG_S)


@pytest.fixture(scope="module", params=sorted(redis_binaries()))
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder), redis_binaries()[request.param]) as running:
        yield running


class ValuesLane:
    """Two workers and a gateway under one prefix, and the address of a third worker that answers anything."""

    def __init__(self, server: RedisServer, number: int, client: WorkerClient, answers: Sequence[Answers]) -> None:
        self.notes: list[str] = []
        self.secret = SECRET if number % 2 else b""
        self.prefix = f"values-{next(_numbers)}"
        self.keys = keys_of(self.prefix)
        self.store = redis.Redis(unix_socket_path=str(server.socket))
        self.ghost = answers[2]
        self.client = client
        self.answers = answers
        rng = random.Random(number)
        self.hashes = chain(rng, NUM_BLOCKS)
        members = [member("w0", answers[0].url), member("w1", answers[1].url, tiers=("disk",))]
        self.workers = [Worker(server.url, self.prefix, self.secret, own, HANG_S, LEASE_S) for own in members]
        is_static = number % 4 < 2
        static = [answers[0].url, answers[1].url, self.ghost.url] if is_static else [self.ghost.url]
        self.gateway = Gateway(server.url, self.prefix, self.secret, client.state, client, static, HANG_S)
        self.parts = Parts()
        self.asked_for: list[WorkerMember] = []
        self.touched: set[str] = set()
        self.undo: list[tuple[Any, ...]] = []
        self.ignored: list[tuple[bytes, bytes, bytes]] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ValuesLane]:
        try:
            for worker, answers in zip(self.workers, self.answers, strict=False):
                worker.begin(self.hashes)
                answers.bodies["/state"] = pack(WorkerState(worker.member, WorkerLoad()))
                answers.bodies["/bundle"] = pack(BUNDLE)
                answers.bodies["/health/live"] = b"{}"
                self.parts.add(f"the publisher of {worker.name}", worker.publishing.publisher.run())
            self.parts.add("the index", self.gateway.index.run())
            await self._back()
            await self.gateway.fleet.poll()
            yield self
        finally:
            await self.parts.stop()
            self.gateway.executor.shutdown(wait=False)
            self.store.close()

    # --- a case -----------------------------------------------------------------------------------------------------

    async def case(self, rng: random.Random) -> None:
        self.touched.clear()
        self.undo.clear()
        self.ignored.clear()
        num_invalid = self.gateway.counts["invalid"]
        for answers in self.answers[:2]:
            if rng.random() < 0.2:
                answers.in_segments = True
                self.notes.append(f"{answers.url} answers in two segments")
        target = rng.choice(self.workers)
        kinds: list[Callable[[random.Random, Worker], None]] = [
            *[self.ghost_member] * 4,
            *[self.ghost_state] * 4,
            *[self.own_member] * 3,
            *[self.own_state] * 3,
            *[self.version] * 2,
            *[self.own_blocks] * 2,
            *[self.wrong_type] * 2,
            *[self.answer] * 3,
            *[self.crowd] * (rng.random() < 0.2),
        ]
        for kind in rng.choices(kinds, k=rng.choice([1, 1, 2, 3])):
            kind(rng, target)
        if rng.random() < 0.9:
            self._write("SET", self.keys.version, rng.randbytes(8))
        try:
            await self._drive(rng, num_invalid)
        finally:
            for command in reversed(self.undo):
                self.store.execute_command(*command)
            self.store.set(self.keys.version, rng.randbytes(8))
            for answers in self.answers:
                answers.in_segments = False
            self.ghost.raw.clear()
            self.ghost.bodies.clear()
        self.parts.check()
        await self._back()

    async def _drive(self, rng: random.Random, num_invalid: int) -> None:
        gateway = self.gateway
        await gateway.lookup(self.hashes)
        await gateway.report()
        for worker in self.workers:
            worker.change(num_removed=1) if len(worker.held) > NUM_BLOCKS else worker.change(chain(rng, 1))
        await asyncio.gather(gateway.fleet.poll(), gateway.lookup(self.hashes), gateway.lookup([], None))
        await gateway.report()
        if self._was_ignored():
            assert gateway.counts["invalid"] > num_invalid, "what was ignored was not counted"
        await gateway.decide(self.hashes)
        found = await gateway.lookup(self.hashes)
        there = {candidate.member.worker_id for candidate in gateway.fleet.candidates(MODEL, found)}
        wanted = {w.name for w in self.workers if self.secret or w.name not in self.touched}
        assert wanted <= there, f"{wanted - there} is no candidate, {there} are; the lookup found {found is not None}"
        await self._dial()
        self.parts.check()

    def _was_ignored(self) -> bool:
        """Return whether Redis has a foreign entry that the gateway ignores."""
        for key, field, value in self.ignored:
            if self._is_hash(key) and self.store.hget(key, field) == value:  # type: ignore[arg-type]
                return True
        if not self._is_hash(self.keys.members):
            return False
        fields: Any = self.store.hkeys(self.keys.members)
        known = {member.worker_id.encode() for member in self.gateway.index.members()}
        return any(field not in known for field in fields if field not in (b"w0", b"w1"))

    async def _dial(self) -> None:
        """All that a gateway does with the address of a worker: its errors are WorkerErrors."""
        strangers = [m for m in self.gateway.fleet.workers() if m.worker_id not in ("w0", "w1")][:4]
        if not strangers:
            return
        for stranger in strangers:
            async with asyncio.timeout(HANG_S):
                await self.gateway.models.admit(stranger)
            if stranger.url.rstrip("/") == self.ghost.url:
                continue
            await self.client.is_alive(stranger.url)
            request = GenerateRequest("r", "g", "", b"\0" * 16, [1], (ChoiceState(0, 1),), SamplingParams(1))
            with suppress(WorkerError):
                async with GenerateStream(self.client, stranger.url, request):
                    pass

    async def _back(self) -> None:
        seen: dict[str, int] = {}

        async def back() -> bool:
            self.parts.check()
            for worker in self.workers:
                worker.change()
            found = await self.gateway.lookup(self.hashes)
            seen.clear()
            seen.update({c.member.worker_id: c.matched_blocks for c in found or ()})
            return all(seen.get(worker.name) == NUM_BLOCKS for worker in self.workers) and all(
                worker.stands(self.store) for worker in self.workers
            )

        await within(
            BACK_S, back, lambda: f"the index is not back: {seen}, sets {[w.stands(self.store) for w in self.workers]}"
        )

    # --- what is written --------------------------------------------------------------------------------------------

    def _write(self, *command: Any) -> None:
        self.notes.append(repr(command)[:3000])
        self.store.execute_command(*command)

    def ghost_member(self, rng: random.Random, target: Worker) -> None:
        name = garbage.name(rng)
        if not self._is_hash(self.keys.members):
            return
        if rng.random() < 0.4:  # one that may be taken for a worker's
            name = b"ghost"
            changes: dict[str, Any] = {"url": rng.choice([*garbage.UNDIALLABLE, self.ghost.url, self.ghost.url])}
            if rng.random() < 0.7:
                changes["model"] = f"model-{rng.randrange(10**9)}"
            if rng.random() < 0.2:
                changes |= {rng.choice(["block_size", "max_model_len", "protocol"]): rng.choice(garbage.INTEGERS)}
            if rng.random() < 0.2:
                changes |= {rng.choice(["epoch", "namespace", "numerics", "model"]): rng.choice(garbage.TEXTS)}
            value = self._record(self._ghost(rng, changes))
        else:
            value = self._member_value(rng, schema.encode_member(member("ghost", self.ghost.url)))
        self._write("HSET", self.keys.members, name, value)
        self.undo.append(("HDEL", self.keys.members, name))

    def _ghost(self, rng: random.Random, changes: dict[str, Any]) -> WorkerMember:
        """A worker's own word, signed: its bundle and its state are anything."""
        bundle = self._bundle(rng, changes.get("model", MODEL))
        self.ghost.bodies["/bundle"] = pack(bundle)
        if rng.random() < 0.3:
            self.ghost.bodies["/bundle"] = garbage.changed_msgpack(rng, pack(bundle))
        changed = {name: value for name, value in dataclasses.asdict(bundle).items() if value != getattr(BUNDLE, name)}
        self.notes.append(f"a bundle with {changed!r:.1000}, {self.ghost.bodies['/bundle'] == pack(bundle)}")
        if bundle.block_size > 0:
            changes.setdefault("namespace", bundle.namespace.fingerprint)
        own = member("ghost", **{"url": self.ghost.url, **changes})
        return signed(self.secret, own)

    def _record(self, own: WorkerMember) -> bytes:
        """As the worker itself would write it, signed where there is a secret."""
        return record_of(own, self.prefix, self.secret)

    def _bundle(self, rng: random.Random, model: str) -> TokenizerBundle:
        choices: dict[str, list[Any]] = {
            "tokenizer_json": [b"", b"{}", b"[" * 5000, b"\xff", b"null", BUNDLE.tokenizer_json[:-5], b"[" * 200_000],
            "chat_template": ["{{", "{% for x in y %}", "\x00", "{{ " + "(" * 3000, "{% include 'x' %}", "x" * 10_000],
            "block_size": [0, -1, 1, 2**62],
            "vocab_size": [0, -1, 2**62],
            "max_model_len": [0, -1, 2**62],
            "eos_token_ids": [(), (-1,), (2**40,)],
            "eos_token": ["", "\x00"],
        }
        changes: dict[str, Any] = {"model": model}
        for field in rng.sample(sorted(choices), rng.choice([0, 1, 1, 2])):
            changes[field] = rng.choice(choices[field])
        return dataclasses.replace(BUNDLE, **changes)

    def _member_value(self, rng: random.Random, genuine: bytes) -> bytes:
        kind = rng.randrange(4)
        if kind == 0:
            return garbage.anything(rng)
        return garbage.changed_bytes(rng, genuine) if kind == 1 else garbage.changed_json(rng, genuine)

    def _state_value(self, rng: random.Random, genuine: bytes) -> bytes:
        kind = rng.randrange(4)
        if kind == 0:
            return garbage.anything(rng)
        return garbage.changed_bytes(rng, genuine) if kind == 1 else garbage.changed_msgpack(rng, genuine)

    def _is_hash(self, key: bytes) -> bool:
        return self.store.type(key) in (b"hash", b"none")

    def _genuine(self, key: bytes, worker: Worker) -> bytes:
        value: Any = self.store.hget(key, worker.name) if self._is_hash(key) else None
        return value or b""

    def ghost_state(self, rng: random.Random, target: Worker) -> None:
        if not (self._is_hash(self.keys.states) and self._is_hash(self.keys.members)):
            return
        field, genuine = garbage.name(rng), self._genuine(self.keys.states, target)
        if rng.random() < 0.5 and genuine:  # of a worker that is there
            own = self._ghost(rng, {"model": MODEL, "url": self.ghost.url, "epoch": "e" * len(target.member.epoch)})
            self.ghost.bodies["/bundle"] = pack(BUNDLE)
            self._write("HSET", self.keys.members, "ghost", self._record(own))
            self.undo.append(("HDEL", self.keys.members, "ghost"))
            field, genuine = b"ghost", genuine.replace(target.member.epoch.encode(), own.epoch.encode())
        else:
            self.touched.add(target.name)  # perhaps the target's own state with other contents
        value = garbage.anything(rng) if rng.random() < 0.2 else self._state_value(rng, genuine)
        self._write("HSET", self.keys.states, field, value)
        if not value[:1] or not (
            0x90 <= value[0] <= 0x9F or value[0] in (0xDC, 0xDD)
        ):  # no array: no state of any worker
            self.ignored.append((self.keys.states, field, value))
        self.undo.append(("HDEL", self.keys.states, field))

    def own_member(self, rng: random.Random, target: Worker) -> None:
        """Stays: it is the worker that puts it back."""
        if not self._is_hash(self.keys.members):
            return
        self.touched.add(target.name)
        value = self._member_value(rng, self._genuine(self.keys.members, target))
        self._write("HSET", self.keys.members, target.name, value)

    def own_state(self, rng: random.Random, target: Worker) -> None:
        if not (self._is_hash(self.keys.states) and self._is_hash(self.keys.members)):
            return
        self.touched.add(target.name)
        value = self._state_value(rng, self._genuine(self.keys.states, target))
        self._write("HSET", self.keys.states, target.name, value)

    def version(self, rng: random.Random, target: Worker) -> None:
        kind = rng.choice([*HASH_TYPES, "hash", "none"])
        if kind == "string":
            self._write("SET", self.keys.version, rng.choice([b"", b"\xff" * 8, b"x" * 1_000_000, b"1"]))
        else:
            self._make(self.keys.version, kind)
        self.undo.append(("DEL", self.keys.version))

    def own_blocks(self, rng: random.Random, target: Worker) -> None:
        """Entries more or fewer, or another type; the worker notices by itself."""
        key = rng.choice(target.publisher._writer._set_keys)
        kind = rng.choice(["set", "set", "string", "list", "hash", "zset", "none"])
        if kind == "set" and self.store.type(key) in (b"set", b"none"):
            if rng.random() < 0.5:
                self._write("SADD", key, *(rng.randbytes(rng.choice([0, 1, 8, 8, 16, 5000])) for _ in range(5)))
            else:
                self._write("SPOP", key, rng.randrange(1, 30))
        else:
            self._make(key, kind)

    def wrong_type(self, rng: random.Random, target: Worker) -> None:
        """Replace all members or all states: the workers write theirs again once it is gone."""
        key = rng.choice([self.keys.members, self.keys.states])
        self._make(key, rng.choice([*HASH_TYPES, "none"]))
        self.undo.append(("DEL", key))

    def crowd(self, rng: random.Random, target: Worker) -> None:
        key = rng.choice([self.keys.members, self.keys.states])
        if not self._is_hash(key):
            return
        value = rng.choice([b"x", b"\x91" * 900, schema.encode_member(member("ghost", self.ghost.url))])
        fields = {b"crowd-%d" % n: value for n in range(rng.choice([500, 3000]))}
        self.notes.append(f"HSET {key!r} of {len(fields)} fields, each {value!r:.100}")
        self.store.hset(key, mapping=fields)  # type: ignore[arg-type]
        self.undo.append(("HDEL", key, *fields))
        self.ignored.append((key, b"crowd-0", value))

    def answer(self, rng: random.Random, target: Worker) -> None:
        """Set the answer of a registered address about itself."""
        own = self._ghost(rng, {"url": rng.choice([*garbage.UNDIALLABLE, self.ghost.url]), "model": f"m{rng.random()}"})
        state = pack(WorkerState(own, WorkerLoad()))
        kind = rng.randrange(6)
        if kind == 0:
            self.ghost.bodies["/state"] = state
        elif kind < 4:
            change = garbage.changed_bytes if kind == 1 else garbage.changed_msgpack
            self.ghost.bodies["/state"] = change(rng, state)
        elif kind == 4:
            self.ghost.bodies["/state"] = garbage.anything(rng)
        else:
            self.ghost.raw["/state"] = rng.choice(garbage.ANSWERS)
        self.notes.append(f"the ghost answers {self.ghost.bodies.get('/state', self.ghost.raw.get('/state'))!r:.3000}")

    def _make(self, key: bytes, kind: str) -> None:
        self._write("DEL", key)
        commands: dict[str, tuple[Any, ...]] = {
            "string": ("SET", key, b"x"),
            "set": ("SADD", key, b"x"),
            "list": ("RPUSH", key, b"x", b"y"),
            "zset": ("ZADD", key, 1, b"x"),
            "stream": ("XADD", key, "*", b"a", b"b"),
            "hash": ("HSET", key, b"a", b"b"),
        }
        if kind in commands:
            self._write(*commands[kind])


async def _run(server: RedisServer, num_cases: int) -> None:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(worker_client())
        answers = [[Answers() for _ in range(3)] for _ in range(NUM_LANES)]
        for three in answers:
            for each in three:
                await stack.enter_async_context(each.listening())

        def lane(number: int) -> Any:
            for each in answers[number]:
                each.bodies.clear()
                each.raw.clear()
            return ValuesLane(server, number, client, answers[number]).running()

        failures = await run_cases(lane, num_cases, NUM_LANES)
    failures.check()


@pytest.mark.parametrize("num_cases", [NUM_CASES, pytest.param(NUM_DEEP_CASES, marks=pytest.mark.deep)])
@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_no_value_ends_anything(server: RedisServer, loop: str, num_cases: int) -> None:
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(_run(server, num_cases // 2 // len(redis_binaries())))
