"""Room by the blocks that are there: what a worker's pool is counted to hold, over random states of its requests."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from cache.records import Candidate, WorkerLoad
from cache.types import BlockHash, GatewayId
from server.router.cost import WorkerView
from server.router.placement import Placement, Scorer
from server.router.policies import make_policy
from server.router.types import RouteRequest
from tests.server.router.fleets import RATE, Clock, make_request, member

POOL = 1_000
NUM_STATES = [pytest.param(1_000, id="few"), pytest.param(20_000, id="all", marks=pytest.mark.deep)]


class Worker:
    """A worker that only this gateway uses, and all that its requests hold."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.clock = Clock()
        self.scorer = Scorer(GatewayId("g"), make_policy("headstart"), self.clock, rng)
        self.member = member("w")
        self.trunk = [BlockHash(rng.randbytes(16)) for _ in range(rng.randrange(1, 300))]
        self.live: list[Placement] = []
        self.load = WorkerLoad(prefill_tokens_per_s=RATE, num_blocks=POOL, num_free_blocks=POOL)
        self.reported_s = self.clock.now_s

    def request(self) -> RouteRequest:
        shared = self.trunk[: self.rng.randrange(len(self.trunk) + 1)]
        own = [BlockHash(self.rng.randbytes(16)) for _ in range(self.rng.randrange(1, 20))]
        return make_request([*shared, *own])

    def view(self, request: RouteRequest) -> WorkerView:
        matched = self.rng.choice([0, len(request.hashes) // 2])
        candidate = Candidate(self.member, self.load, matched, self.clock.now_s - self.reported_s)
        return self.scorer.decide(request, [candidate]).workers[0]

    def held(self, *more: RouteRequest) -> int:
        """Return the different blocks of live requests, and of `more`."""
        requests = [*(each.request for each in self.live), *more]
        return len({block_hash for each in requests for block_hash in each.hashes}) + len(requests)

    def step(self) -> None:
        """Let something happen."""
        self.clock.now_s += self.rng.choice([0.0, 0.01, 0.3])
        match self.rng.choice(["place", "place", "start", "token", "close", "report"]):
            case "place" if len(self.live) < 12:
                candidate = Candidate(self.member, self.load, 0, self.clock.now_s - self.reported_s)
                self.live.append(self.scorer.place(self.scorer.decide(self.request(), [candidate])))
            case "start" if self.live:
                self.scorer.started(self.rng.choice(self.live), 0)
            case "token" if self.live:
                placement = self.rng.choice(self.live)
                self.scorer.started(placement, 0)
                self.scorer.first_token(placement)
            case "close" if self.live:
                self.scorer.closed(self.live.pop(self.rng.randrange(len(self.live))))
            case "report":
                self.clock.now_s += 0.01
                started = [each.request for each in self.live if each.active.started_s is not None]
                hashes = {block_hash for each in started for block_hash in each.hashes}
                self.load = replace(self.load, num_free_blocks=POOL - len(hashes) - len(started))
                self.reported_s = self.clock.now_s
                self.view(self.request())  # the estimate sees it before anything else happens
                self.clock.now_s += 0.01


@pytest.mark.parametrize("num_states", NUM_STATES)
def test_the_counted_use_is_what_is_there_and_new(num_states: int) -> None:
    """At most the blocks of live requests and the new ones; a sibling adds at most its own new ones."""
    num_seen = num_shared = 0
    for seed in range(num_states // 10):
        worker = Worker(random.Random(seed))
        for _ in range(30):
            worker.step()
            if num_seen >= 10 * (seed + 1):
                break
            request, num_seen = worker.request(), num_seen + 1
            view = worker.view(request)
            assert round(view.kv_usage * POOL) <= worker.held(request)
            num_shared += view.num_live_blocks > 0
            sibling = worker.request()
            new = worker.held(sibling) - worker.held()
            candidate = Candidate(worker.member, worker.load, 0, worker.clock.now_s - worker.reported_s)
            worker.live.append(worker.scorer.place(worker.scorer.decide(sibling, [candidate])))
            assert worker.view(request).kv_usage <= view.kv_usage + new / POOL + 1e-9
            worker.scorer.closed(worker.live.pop())
    assert num_seen == num_states
    assert num_shared > num_states / 4
