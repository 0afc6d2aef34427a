"""`headstart bench cache`: the cost of the paged cache's bookkeeping for a request, and of hashing its blocks.

A request is looked up, allocated and released, with its hashes computed before, as a worker does it. Pools are full of
findable blocks. So the blocks that a request finds are spread over memory, and each new block evicts another. Every
figure is the best of several rounds over different requests: the rest is noise of the machine.
"""

from __future__ import annotations

import argparse
import gc
import random
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Final

from benchmarks.report import Figure, Report, option_parser, publish
from cache.allocators.hash import HashAllocator
from cache.hashing import Namespace, hash_chain
from cache.types import BlockHash

BLOCK_SIZE: Final = 16
REQUESTS_PER_ROUND: Final = 8


@dataclass(frozen=True, slots=True)
class Request:
    token_ids: list[int]
    hashes: list[BlockHash]


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of one length, each made from its number whenever it is needed."""

    root: BlockHash
    prompt_tokens: int

    @property
    def prompt_blocks(self) -> int:
        return self.prompt_tokens // BLOCK_SIZE

    def token_ids(self, number: int) -> list[int]:
        return random.Random(number).choices(range(50_000), k=self.prompt_tokens)

    def request(self, number: int) -> Request:
        token_ids = self.token_ids(number)
        return Request(token_ids, hash_chain(self.root, token_ids, BLOCK_SIZE))


def full_pool(num_blocks: int, workload: Workload) -> tuple[HashAllocator, int]:
    """A pool of which nearly every block is free and findable, and the number of prompts in it."""
    allocator = HashAllocator(num_blocks + 1, BLOCK_SIZE)
    num_prompts = num_blocks // workload.prompt_blocks
    for number in range(num_prompts):
        serve(allocator, workload.request(number))
    return allocator, num_prompts


def serve(allocator: HashAllocator, request: Request) -> None:
    """A whole request, its commit and its events included."""
    allocation = allocator.allocate(len(request.token_ids), request.token_ids, BlockHash(b""), hashes=request.hashes)
    assert allocation is not None
    allocation.commit(request.token_ids, len(request.token_ids))
    allocation.free()
    allocator.take_events()


def hold_and_release(allocator: HashAllocator, request: Request) -> None:
    """Seconds of one round: lookup, allocation and release."""
    allocation = allocator.allocate(len(request.token_ids), request.token_ids, BlockHash(b""), hashes=request.hashes)
    assert allocation is not None
    allocation.free()


def ns_per_block(
    rounds: int, requests: Callable[[], list[Request]], action: Callable[[Request], object], blocks: int
) -> float:
    """The best round's time for each of the `blocks` blocks of a request."""
    best = float("inf")
    for _ in range(rounds):
        batch = requests()
        with no_collector():
            start = perf_counter_ns()
            for request in batch:
                action(request)
            elapsed = perf_counter_ns() - start
        best = min(best, elapsed / (len(batch) * blocks))
    return best


def hash_ns(workload: Workload, rounds: int) -> float:
    numbers = iter(range(1_000_000_000, 2_000_000_000))
    return ns_per_block(
        rounds,
        lambda: [Request(workload.token_ids(next(numbers)), []) for _ in range(REQUESTS_PER_ROUND)],
        lambda request: hash_chain(workload.root, request.token_ids, BLOCK_SIZE),
        workload.prompt_blocks,
    )


def hit_ns(allocator: HashAllocator, num_prompts: int, workload: Workload, rounds: int) -> float:
    """Prompts of the pool at random: all their blocks but the last are found, and that one is taken."""
    choose = random.Random(0)
    before = allocator.stats().hit_tokens
    value = ns_per_block(
        rounds,
        # The latest three quarters: what a hit takes besides its prefix evicts the oldest.
        lambda: [workload.request(choose.randrange(num_prompts // 4, num_prompts)) for _ in range(REQUESTS_PER_ROUND)],
        lambda request: hold_and_release(allocator, request),
        workload.prompt_blocks,
    )
    expected = rounds * REQUESTS_PER_ROUND * (workload.prompt_tokens - BLOCK_SIZE)
    assert allocator.stats().hit_tokens - before == expected, "a request of the bench was not found"
    return value


def miss_ns(allocator: HashAllocator, workload: Workload, rounds: int) -> float:
    """Return new prompts: every block that they take is evicted."""
    numbers = iter(range(1_000_000, 2_000_000))
    before = allocator.stats()

    def requests() -> list[Request]:
        allocator.take_events()
        return [workload.request(next(numbers)) for _ in range(REQUESTS_PER_ROUND)]

    def hold(request: Request) -> None:
        hold_and_release(allocator, request)

    value = ns_per_block(rounds, requests, hold, workload.prompt_blocks)
    after = allocator.stats()
    assert after.hit_tokens == before.hit_tokens, "a request of the bench was found"
    assert after.evictions - before.evictions >= 0.95 * rounds * REQUESTS_PER_ROUND * workload.prompt_blocks
    return value


def commit_ns(workload: Workload, rounds: int) -> float:
    """Make the blocks of a new prompt findable and report them: commit, then take the events."""
    allocator = HashAllocator(2 * workload.prompt_blocks, BLOCK_SIZE)
    best = float("inf")
    for number in range(rounds):
        request = workload.request(number)
        allocation = allocator.allocate(workload.prompt_tokens, request.token_ids, workload.root, hashes=request.hashes)
        assert allocation is not None
        allocator.take_events()
        with no_collector():
            start = perf_counter_ns()
            allocation.commit(request.token_ids, workload.prompt_tokens)
            events = allocator.take_events()
            elapsed = perf_counter_ns() - start
        assert len(events) == workload.prompt_blocks
        allocation.free()
        best = min(best, elapsed / workload.prompt_blocks)
    return best


def bytes_per_block(num_blocks: int, workload: Workload) -> float:
    """Memory of a pool of which every block is free and findable, for each block."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        allocator, num_prompts = full_pool(num_blocks, workload)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert allocator.stats().num_cached_blocks == num_prompts * workload.prompt_blocks
    return (after - before) / num_blocks


@contextmanager
def no_collector() -> Iterator[None]:
    """As `timeit` does: a collection in the middle of a round is not what is measured."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure(options: argparse.Namespace) -> list[Figure]:
    root = Namespace("bench", "main", "bench", BLOCK_SIZE).root(salt=b"bench")
    workload = Workload(root, options.prompt_tokens)
    rounds = options.rounds
    hashing = hash_ns(workload, rounds)
    allocator, num_prompts = full_pool(options.blocks, workload)
    hit = hit_ns(allocator, num_prompts, workload, rounds)
    miss = miss_ns(full_pool(options.blocks, workload)[0], workload, rounds)
    allocator, num_prompts = full_pool(options.large_blocks, workload)
    large_hit = hit_ns(allocator, num_prompts, workload, rounds)
    del allocator
    return [
        figure("hash_ns_per_block", hashing, f"hash {workload.prompt_blocks} blocks of {BLOCK_SIZE} tokens"),
        figure("hit_ns_per_block", hit, f"find all: {hit / hashing:.2f} x hash", goal=0.6 * hashing),
        figure("miss_ns_per_block", miss, f"evict all: {miss / hashing:.2f} x hash", goal=0.8 * hashing),
        figure("hit_ns_per_block_1m", large_hit, f"of {options.large_blocks:,}: {large_hit / hit:.2f} x", goal=2 * hit),
        figure("commit_ns_per_block", commit_ns(workload, rounds), "make findable, take the events"),
        figure("bytes_per_block", bytes_per_block(options.blocks, workload), "free, with its hash", goal=240),
    ]


def figure(name: str, value: float, note: str, goal: float | None = None) -> Figure:
    unit = "bytes" if name.startswith("bytes") else "ns"
    return Figure(name, value, unit, note, "" if goal is None else f"<= {goal:.0f}")


def main(argv: list[str]) -> int:
    parser = option_parser("cache", "Lookup, allocation and release of a request, in ns a block, and memory a block.")
    parser.add_argument("--blocks", type=int, default=100_000, help="size of the pool (default %(default)s)")
    parser.add_argument("--large-blocks", type=int, default=1_000_000, help="of the large pool (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=8192, help="length of a request (default %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=15, help=f"of {REQUESTS_PER_ROUND} requests (default %(default)s)"
    )
    options = parser.parse_args(argv)
    needed = options.rounds * REQUESTS_PER_ROUND * (options.prompt_tokens // BLOCK_SIZE)
    if options.blocks < needed:
        parser.error(f"--blocks: {options.rounds} rounds evict {needed:,} blocks, the pool has {options.blocks:,}")
    env = {name: getattr(options, name) for name in ("blocks", "large_blocks", "prompt_tokens", "rounds")}
    publish(Report("cache", measure(options), env), options)
    return 0
