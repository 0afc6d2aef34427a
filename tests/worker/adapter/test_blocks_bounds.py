"""EngineBlocks under events that no engine should send: cycles, repeats, lost parents. None of them takes long."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from cache.events import BlockEvent
from cache.hashing import hash_chain
from tests.block_events import replay
from tests.refusals import frozen
from tests.worker.adapter.fake_blocks import OTHER, ROOT, stored
from worker.adapter.blocks import EngineBlocks
from worker.adapter.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event

MAX_BATCH_S = 0.05
"""Processor time of this thread for one batch, without collections of garbage."""
SALTED = ((ROOT.hex(),),)
DEPTH = 100_000


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    with frozen():
        yield


def chaotic_event(rng: random.Random, num_keys: int) -> Event:
    def key() -> int:
        return rng.randrange(num_keys)

    kind = rng.random()
    if kind < 0.02:
        return AllBlocksCleared()
    if kind < 0.25:
        keys = tuple(key() for _ in range(rng.randrange(1, 6)))
        return BlockRemoved(keys, remaining_copy_counts=rng.choice((None, tuple(rng.randrange(2) for _ in keys), ())))
    keys = tuple(key() for _ in range(rng.randrange(1, 12)))
    parent = rng.choice((None, key(), key(), keys[0], keys[-1]))
    tokens = tuple(rng.randrange(2) for _ in range(2 * len(keys) - (rng.random() < 0.05)))
    first = rng.choice((None, (ROOT.hex(),), (ROOT.hex(),), (OTHER.hex(),), ("image", 0)))
    return BlockStored(keys, parent, tokens, 2, extra_keys=(first, *(None for _ in keys[1:])) if first else None)


def chaotic_batches(seed: int, num_batches: int) -> Iterator[list[Event]]:
    rng = random.Random(seed)
    for _ in range(num_batches):
        yield [chaotic_event(rng, rng.choice((2, 5, 40))) for _ in range(rng.randrange(1, 8))]


def with_pairs(event: Event) -> Event:
    """The same event as SGLang sends it with EAGLE."""
    if not isinstance(event, BlockStored):
        return event
    salt = None if event.extra_keys is None or event.extra_keys[0] is None else event.extra_keys[0][0]
    return replace(event, extra_keys=None, cache_salt=salt, is_bigram=True)


def run_chaos(seed: int, num_batches: int, *, sends_pairs: bool) -> None:
    rng = random.Random(seed)
    block_size = rng.choice((1, 2, 3))
    blocks = EngineBlocks(block_size, max_names=20)
    published: set[bytes] = set()

    def take(events: list[BlockEvent]) -> None:
        replay(events, published)  # type: ignore[arg-type]
        assert published == replay(blocks.visible_events())

    for number, sent in enumerate(chaotic_batches(seed, num_batches)):
        batch = [with_pairs(event) for event in sent] if sends_pairs else sent
        prompt = [rng.randrange(2) for _ in range(20)]
        if number % 50 == 0:
            take(blocks.forget_held())
        begun_s = time.thread_time()
        applied = blocks.apply(batch)
        assert time.thread_time() - begun_s < MAX_BATCH_S, batch
        if applied.cleared:
            published.clear()
        take(applied.events)
        if number % 5 == 0:
            hashes = hash_chain(ROOT, prompt, block_size)
            num_found = rng.randrange(blocks.num_matched_tokens(hashes, 20) + 1)
            take(blocks.remove_missing(hashes, num_found, blocks.num_batches - rng.randrange(3)))


@pytest.mark.parametrize("sends_pairs", [False, True])
def test_no_batch_takes_long(sends_pairs: bool) -> None:
    for seed in range(15):
        run_chaos(seed, 100, sends_pairs=sends_pairs)


@pytest.mark.deep
@pytest.mark.parametrize("sends_pairs", [False, True])
def test_none_of_many_batches_takes_long(sends_pairs: bool) -> None:
    for seed in range(500):
        run_chaos(seed, 100, sends_pairs=sends_pairs)


def deep_chain(blocks: EngineBlocks) -> None:
    blocks.apply([stored(*range(DEPTH), size=1, extra=SALTED + (None,) * (DEPTH - 1))])


@pytest.mark.parametrize("size", [1, 2])
def test_a_block_that_is_its_own_parent(size: int) -> None:
    blocks = EngineBlocks(2, max_names=100)
    for _ in range(3):
        blocks.apply([stored(7, parent=7, tokens=(1,) * size, size=size), stored(8, 7, 8, parent=8, size=size)])
        blocks.apply([BlockRemoved((7, 8))])
    assert blocks.visible_events() == []


def test_a_batch_that_toggles_a_deep_chain_is_bounded() -> None:
    """It costs a few walks over all the blocks, not one for each event."""
    blocks = EngineBlocks(1, max_names=2 * DEPTH)
    deep_chain(blocks)
    toggles: list[Event] = []
    for number in range(100):
        toggles += [BlockRemoved((0,)), stored(DEPTH + number, parent=DEPTH - 1, tokens=(9,), size=1)]
    begun_s = time.thread_time()
    blocks.apply([BlockRemoved((0,)), stored(3 * DEPTH, parent=DEPTH - 1, tokens=(9,), size=1)])
    once_s = time.thread_time() - begun_s
    begun_s = time.thread_time()
    blocks.apply(toggles)
    assert time.thread_time() - begun_s < 20 * once_s
    blocks.forget_held()
    blocks.apply([stored(2 * DEPTH, parent=DEPTH - 1, tokens=(9,), size=1)])
    assert len(blocks.visible_events()) >= DEPTH
