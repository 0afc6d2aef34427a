"""A router over a fleet, an index in memory that can go away, and workers that answer from a dict."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from benchmarks.dev.simulation.memory_index import MemoryIndex
from cache.records import Candidate, WorkerLoad, WorkerMember, WorkerState
from cache.types import BlockHash, Epoch, GatewayId, WorkerId, WorkerIncarnation
from server.metrics import GatewayMetrics
from server.ops.overview import Overview
from server.ops.workers_needed import WorkersNeeded
from server.router.copies import Copies, CopyPlanner, SendCopy
from server.router.decisions import DecisionLog
from server.router.index_accuracy import IndexAccuracy
from server.router.placement import Placement
from server.router.queue import RequestQueue
from server.router.router import Router
from server.router.types import RouteRequest
from server.workers.connection import WorkerAbsent, WorkerLost
from server.workers.fleet import Fleet
from tests.members import make_member

BLOCK = 16
RATE = 1000.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Index:
    """The in-memory index, which can go away."""

    def __init__(self, clock: Clock) -> None:
        self.memory = MemoryIndex(clock, lease_s=5.0)
        self.away = False
        self.registered: dict[str, WorkerMember] = {}

    def register(self, member: WorkerMember, held: Sequence[BlockHash] = (), load: WorkerLoad | None = None) -> None:
        self.registered[member.worker_id] = member
        self.memory.register(member, held, load or WorkerLoad(prefill_tokens_per_s=RATE))

    async def lookup(
        self, hashes: Sequence[BlockHash], model: str | None = None, num_tokens: int = 0
    ) -> list[Candidate] | None:
        return None if self.away else self.memory.match(hashes, model)

    def members(self) -> list[WorkerMember]:
        return [] if self.away else list(self.registered.values())


def member(name: str, epoch: str = "e", **changes: object) -> WorkerMember:
    fields = {"url": f"http://{name}:8000", "block_size": BLOCK, "max_model_len": 100_000}
    return make_member(name, epoch, **{**fields, **changes})


def incarnations(*names: str) -> frozenset[WorkerIncarnation]:
    return frozenset((WorkerId(name), Epoch("e")) for name in names)


def chain(length: int) -> list[BlockHash]:
    return [BlockHash(os.urandom(16)) for _ in range(length)]


def make_request(hashes: Sequence[BlockHash], **changes: object) -> RouteRequest:
    fields: dict[str, object] = {
        "request_id": "r",
        "model": "m",
        "num_prompt_tokens": len(hashes) * BLOCK + 1,
        "hashes": hashes,
    }
    return RouteRequest(**{**fields, **changes})  # type: ignore[arg-type]


async def no_copy(url: str, source: WorkerMember, root: BlockHash, hashes: Sequence[BlockHash]) -> int:
    raise AssertionError("nothing is copied")


class Fleets:
    """A router over a fleet whose workers answer from a dict."""

    def __init__(
        self,
        policy: str = "headstart",
        workers: tuple[str, ...] = (),
        hold_s: float = 0.0,
        send_copy: SendCopy | None = None,
        max_copies: int = 4,
    ) -> None:
        self.clock = Clock()
        self.index = Index(self.clock)
        self.states: dict[str, WorkerState | Exception] = {}
        self.fleet = Fleet(self.index, self.fetch, targets=workers, clock=self.clock)
        self.metrics = GatewayMetrics()
        planner = CopyPlanner(self.clock, max_copies if send_copy is not None else 0)
        self.decisions, self.accuracy = DecisionLog(self.clock), IndexAccuracy()
        self.copies = Copies(planner, send_copy or no_copy, self.metrics)
        self.workers_needed = WorkersNeeded(3.0, self.clock)
        self.router = Router(
            self.index,
            self.fleet,
            GatewayId("g"),
            self.metrics,
            policy=policy,
            queue=RequestQueue(hold_s, clock=self.clock),
            listeners=(self.accuracy, self.decisions, self.copies),
            clock=self.clock,
            rng=random.Random(1),
        )

    async def explain(self, request: RouteRequest) -> dict[str, Any]:
        """Return the ops port's explanation."""
        services: Any = SimpleNamespace(requests=SimpleNamespace(metrics=self.metrics))
        followers = self.decisions, self.accuracy, self.copies, self.workers_needed
        parts: Any = SimpleNamespace(services=services), self.router, *followers, self.index, None, None
        return await Overview(*parts).explain(request)

    def index_state(self) -> dict[str, Any]:
        return self.accuracy.state(lookup_failed=self.router.lookup_failed)

    async def fetch(self, url: str) -> WorkerState:
        state = self.states.get(url, WorkerLost("no answer"))
        if isinstance(state, ConnectionRefusedError):
            raise WorkerAbsent("refused") from state
        if isinstance(state, Exception):
            raise state
        return state

    def run_fifo(self) -> None:
        """Make every worker run its prefills one by one. Call it before anything else."""
        for each in list(self.index.registered.values()):
            self.index.register(replace(each, prefill_order="fifo"))

    async def place(self, hashes: Sequence[BlockHash], **changes: object) -> Placement:
        return await self.router.place(make_request(hashes, **changes))

    async def worker(self, hashes: Sequence[BlockHash], **changes: object) -> str:
        """Return the id of the worker that gets it, and close it at once."""
        placement = await self.place(hashes, **changes)
        self.router.closed(placement)
        return placement.worker.worker_id
