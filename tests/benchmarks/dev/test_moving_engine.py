"""The simulated worker that loads and fetches: what it moves, what it computes, and how links queue."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks.dev.simulation.engine import EngineModel, Job
from benchmarks.dev.simulation.moving_engine import MovingWorker
from benchmarks.dev.simulation.traces import ROOT, Session, TraceRequest
from cache.allocators.hash import HashAllocator
from cache.hashing import hash_chain
from cache.types import GatewayId
from tests.server.router.fleets import member
from worker.wire import BlockSource

RATE = 1000.0
SIZE = 100
FETCH_S = 10 * SIZE / (10 * RATE)


def request(num_blocks: int, first: int = 1) -> TraceRequest:
    block_ids = [*range(first, first + num_blocks), 1 << 31]
    chain = hash_chain(ROOT, block_ids, 1)
    return TraceRequest(0, num_blocks * SIZE + 1, 1, block_ids, chain, chain[:-1])


def job(wanted: TraceRequest, source: BlockSource | None = None) -> Job:
    placement = SimpleNamespace(source=source)
    return Job(wanted, GatewayId("g"), 0.0, placement, Session(0.0, [wanted], [0.0], 0), 0)  # type: ignore[arg-type]


def fleet(num_workers: int, tier_blocks: int = 0) -> list[MovingWorker]:
    model = EngineModel(RATE, SIZE, fetch_tokens_per_s=10 * RATE, tier_tokens_per_s=(20 * RATE,))
    peers: dict[str, MovingWorker] = {}
    for number in range(num_workers):
        tier = HashAllocator(tier_blocks + 1, 1) if tier_blocks else None
        each = member(f"w{number}", layout="l")
        peers[each.url] = MovingWorker(each, model, HashAllocator(31, 1), 0.0, tier=tier, peers=peers)
    return list(peers.values())


def compute(worker: MovingWorker, wanted: TraceRequest) -> None:
    """Answer a request with the worker, so that it holds the prompt."""
    worker.submit(job(wanted), 0.0)
    (admitted,) = worker.admit(0.0)
    worker.start(admitted, 0.0)
    worker.finish_decode(worker.finish_next(worker.next_end_s(0.0) or 0.0), 0.0)


def source(worker: MovingWorker, num_blocks: int) -> BlockSource:
    return BlockSource(worker.member.url, worker.member.epoch, num_blocks)


def test_a_fetch_delays_its_request() -> None:
    """The worker computes only the rest of the prompt, and then holds the fetched blocks."""
    holder, target = fleet(2)
    compute(holder, request(10))
    target.submit(job(request(12), source(holder, 10)), 1.0)
    (admitted,) = target.admit(1.0)
    assert admitted.num_cached_tokens == 10 * SIZE
    assert admitted.loaded_s == pytest.approx(1.0 + FETCH_S)
    target.start(admitted, admitted.loaded_s)
    assert admitted.prefill_s == pytest.approx(0.01 + (2 * SIZE + 1) / RATE)
    assert target.cache.find(request(12).block_ids, ROOT, hashes=request(12).chain) == 10, "what came is findable"


def test_a_busy_link_queues() -> None:
    holder, one, other = fleet(3)
    compute(holder, request(10))
    ends = []
    for target in (one, other):
        target.submit(job(request(10), source(holder, 10)), 0.0)
        ends.append(target.admit(0.0)[0].loaded_s)
    assert ends == pytest.approx([FETCH_S, 2 * FETCH_S], rel=0.01)


def test_requests_for_the_same_blocks_share_a_fetch() -> None:
    holder, target = fleet(2)
    compute(holder, request(10))
    first = job(request(10), source(holder, 10))
    target.submit(first, 0.0)
    target.admit(0.0)
    second = job(request(12))
    target.submit(second, 0.01)
    assert second.estimate_s == pytest.approx((2 * SIZE + 1) / RATE)
    target.admit(0.01)
    assert second.loaded_s == first.loaded_s
    for each in (first, second):
        target.start(each, first.loaded_s)
    assert second.num_cached_tokens == 10 * SIZE


def test_a_request_waits_for_a_prefix_that_is_computed() -> None:
    (worker,) = fleet(1)
    worker.submit(job(request(10)), 0.0)
    (first,) = worker.admit(0.0)
    worker.start(first, 0.0)
    second = job(request(12))
    worker.submit(second, 0.1)
    assert worker.admit(0.1) == []
    ended_s = worker.next_end_s(0.1) or 0.0
    worker.finish_next(ended_s)
    assert worker.admit(ended_s) == [second]
    assert second.num_cached_tokens == 10 * SIZE


def test_a_copy_comes_slowly_from_a_busy_worker() -> None:
    holder, target = fleet(2)
    wanted = request(10)
    compute(holder, wanted)
    for num_decoding, slower in ((0, 1), (1, 4)):
        holder.num_decoding = num_decoding
        copy = target.copy(wanted.hashes, holder, 1.0)
        assert copy is not None
        assert copy[0] == pytest.approx(1.0 + slower * FETCH_S)
        copy[1].free()
    copy = target.copy(wanted.hashes, holder, 1.0)
    assert copy is not None
    copy[1].fill(10)
    copy[1].free()
    assert target.copy(wanted.hashes, holder, 1.0) is None, "it is there"


def test_a_source_that_has_evicted_the_blocks_gives_none() -> None:
    holder, target = fleet(2)
    compute(holder, request(10))
    compute(holder, request(25, first=1000))
    target.submit(job(request(10), source(holder, 10)), 0.0)
    (admitted,) = target.admit(0.0)
    num_left = holder.num_held_blocks(request(10))
    assert num_left < 10
    assert admitted.num_cached_tokens == num_left * SIZE


def test_what_the_pool_evicted_is_loaded_from_the_tier() -> None:
    (worker,) = fleet(1, tier_blocks=100)
    compute(worker, request(10))
    compute(worker, request(29, first=1000))
    worker.submit(job(request(10)), 1.0)
    (admitted,) = worker.admit(1.0)
    in_pool = admitted.allocation.num_cached_tokens if admitted.allocation else 0
    assert in_pool < 10
    assert admitted.num_cached_tokens == 10 * SIZE
    assert admitted.loaded_s == pytest.approx(1.0 + (10 - in_pool) * SIZE / (20 * RATE))
