"""Random schedules over exact arithmetic or tiny models. Each choice must get the tokens of a run by itself.

In exact arithmetic, the next token is a function of all tokens in the block table and the rules. A tiny
model runs under the real runner. An episode is drawn from a number, which a failure prints: `run_episode(number)`
repeats it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

from cache.allocators import PREFIX_CACHES
from cache.allocators.hash import HashAllocator
from cache.allocators.radix import RadixAllocator
from cache.block_record import RecordFormat
from cache.hashing import hash_chain
from cache.stores.host import HostStore
from cache.types import BlockHash, BlockId
from tests.cache.held import cached_hashes
from tests.worker.device_streams import LateStream, ThreadedStream
from tests.worker.kv_transfer.moving_engine import BLOCK_SIZE, LAYOUT, SECRET, MovingEngine
from tests.worker.scheduler.engine import FAILED, ROOT, HandEngine, generate
from tests.worker.scheduler.episode_models import EXACT, Alone, EpisodeModel, Faults
from tests.worker.scheduler.episode_requests import EOS, Asked, draw_plain_requests, draw_request, draw_twins
from worker.contracts.engine import RequestKey
from worker.kernels.device import DeviceStream
from worker.scheduler.request import Request
from worker.wire import End, Failed


@contextmanager
def stream_of(kind: str):
    stream: DeviceStream | None = None
    if kind == "late":
        stream = LateStream()
    elif kind == "threaded":
        stream = ThreadedStream()
    try:
        yield stream
    finally:
        if isinstance(stream, ThreadedStream):
            stream.close()


def run_episode(number: int, models: Sequence[EpisodeModel] = EXACT) -> HandEngine:
    """Draw an episode over one of the models, and run it. Raises AssertionError. Returns the engine, for its counts."""
    rng = Random(number)
    with stream_of(rng.choice(["none", "late", "late", "late", "threaded"])) as stream:
        episode = _Episode(rng, rng.choice(models), stream)
        episode.run()
        return episode.engine


def draw_faults(rng: Random, asked: Sequence[Asked]) -> Faults:
    """Draw the faults of an episode; most have none."""
    raising, spoiled, broken = frozenset[int](), {}, None
    if rng.random() < 0.2:
        raising = frozenset(rng.randrange(60) for _ in range(4))
    if rng.random() < 0.15:
        spoiled = {rng.randrange(60): rng.randrange(8) for _ in range(4)}
    if rng.random() < 0.15:
        broken = rng.choice(asked).prompt_ids, rng.randrange(8)
    return Faults(raising, spoiled, broken)


class _Episode:
    def __init__(self, rng: Random, model: EpisodeModel, stream: DeviceStream | None) -> None:
        self.rng = rng
        self.model = model
        num_steps = rng.choice([0, 4, 12])
        self.is_plain = rng.random() < 0.3
        asked = [draw_request(rng, num_steps) for _ in range(rng.randint(1, 7))]
        if self.is_plain:
            asked = draw_plain_requests(rng)
        if rng.random() < 0.4:
            asked = [*draw_twins(rng, asked[0]), *(asked if rng.random() < 0.7 else asked[:1])]
        self.faults = draw_faults(rng, asked)
        self.expected = {
            one: [self.faults.limit(one, model.alone(one, index)) for index in range(one.n)] for one in asked
        }
        self.asked = sorted(asked, key=lambda one: one.step)
        self.num_rounds = rng.choice([1, 1, 1, 2])
        """All requests come again when the pool is warm."""
        longest = max(len(one.prompt_ids) + one.max_tokens for one in asked)
        smallest = 1 + -(-longest // BLOCK_SIZE)  # holds the longest choice, and the null block
        num_blocks = rng.choice([smallest, smallest, smallest + 1, smallest + 3, 20, 40])
        prefix_cache = rng.choice(PREFIX_CACHES)
        self.runner = model.make_runner(num_blocks, self.faults, stream)
        max_step_tokens = rng.choice([6, 10, 40, 40])
        max_solo_tokens = rng.choice([None, None, 60])
        options: dict[str, Any] = {
            "num_blocks": num_blocks,
            "runner": self.runner,
            "async_scheduling": stream is not None and rng.random() < 0.8,
            "eos": EOS,
            "max_drafts": rng.choice([0, 1, 3, 6]),
            "max_num_seqs": 6 if self.is_plain else rng.choice([1, 2, 4, 6]),
            "max_num_batched_tokens": max_step_tokens,
            "max_solo_prefill_tokens": max_solo_tokens,
            "watermark": rng.choice([0.0, 0.0, 0.1, 0.4]),
            "waiting_served_ratio": rng.choice([None, None, 0.5, 1.2]),
            "max_waiting_tokens": 4,
            "max_batch_total_tokens": rng.choice([None, None, 60]),
        }
        if prefix_cache == "off" and model.window is not None and rng.random() < 0.8:
            options["window_size"] = model.window + (max_solo_tokens or max_step_tokens)
        self.in_flight = stream is not None and rng.random() < 0.7
        self.reset_at = rng.randint(1, 20) if rng.random() < 0.15 else None
        self.engine: HandEngine
        if prefix_cache == "hash" and rng.random() < 0.4:
            copier = model.copier(self.runner)
            store = HostStore([memoryview(bytearray(12 * copier.num_bytes))], copier.num_bytes)
            record = RecordFormat(LAYOUT, copier.num_bytes, SECRET)
            self.engine = MovingEngine([store], {}, rng, record, copier=copier, **options)
        else:
            self.engine = HandEngine(block_size=BLOCK_SIZE, prefix_cache=prefix_cache, **options)
        self.live: list[tuple[Asked, dict[int, list[int]], int, Request]] = []
        self.aborted: set[tuple[RequestKey, int | None]] = set()
        """Choices that were aborted, by request. None: all of it."""
        self.left: list[Asked] = []
        self.known: list[list[int]] = []
        """The tokens of every choice, whose blocks may be in the pool."""
        self.step = 0
        self.round_step = 0
        """The step at which the requests began to come."""

    def run(self) -> None:
        """Run all steps, and check every answer and the pool."""
        engine = self.engine
        for _ in range(self.num_rounds):
            self.left, self.round_step = self.asked.copy(), self.step
            while self.left or engine.scheduler.has_work or engine.in_flight:
                if not self.in_flight:
                    self.submit_and_abort()
                if self.step == self.reset_at:
                    self.reset()
                self.take_step()
                self.step += 1
                assert self.step < 3000, "no end in sight"
        if isinstance(engine, MovingEngine):
            engine.transfers.fetches.give_up_all()
        engine.finish()
        for asked, resumed, _, request in self.live:
            self.check_answer(asked, resumed, request)
        has_empty = any(alone.reason in ("no token", "not finite") for each in self.expected.values() for alone in each)
        may_fail = self.faults.any_step or self.faults.broken is not None or has_empty
        assert may_fail or not engine.num_failed_steps, "a step failed for nothing"
        self.check_pool()
        if isinstance(engine, MovingEngine):
            engine.transfers.close()

    def take_step(self) -> None:
        engine, has_work = self.engine, self.engine.scheduler.has_work
        plan = engine.step(self.submit_and_abort if self.in_flight else lambda: None)
        if plan is None and has_work:
            has_loads = isinstance(engine, MovingEngine) and len(engine.transfers.fetches.active) > 0
            assert has_loads, "work is left but nothing was scheduled"
        held = {block_id for allocation in engine.allocator._live for block_id in allocation.block_table}
        assert len(held) + engine.allocator.num_free_blocks == engine.allocator.num_blocks - 1, (
            "blocks held in no table"
        )
        if isinstance(engine, MovingEngine):
            engine.move_blocks(4)

    def submit_and_abort(self) -> None:
        while self.left and self.round_step + self.left[0].step <= self.step:
            asked = self.left.pop(0)
            answers = {index: alone.token_ids for index, alone in enumerate(self.expected[asked])}
            resumed = {index: tokens[: asked.num_resumed * (1 + index)] for index, tokens in answers.items()}
            wire = generate(asked.prompt_ids, asked.max_tokens, asked.n, resumed=resumed, **asked.fields)
            constraints = {}
            if asked.grammar_length is not None:
                constraints = {i: self.model.constraint(asked.grammar_length, ids) for i, ids in resumed.items()}
            self.live.append((asked, resumed, self.step, self.engine.submit(wire, constraints)))
        for asked, _, since, request in self.live:
            if asked.abort_after == self.step - since:
                choice = 0 if asked.aborts_first_choice else None
                self.engine.abort(request, choice)
                self.aborted.add((request.key, choice))
        chunks = self.engine.in_flight._launched[0].plan.chunks.values() if self.engine.in_flight else ()
        drafting = [chunk.sequence.request for chunk in chunks if chunk.draft_ids]
        if len(drafting) == 1 and self.rng.random() < 0.3:  # no other has drafts, and the step that verifies them runs
            self.engine.abort(drafting[0])
            self.aborted.add((drafting[0].key, None))

    def reset(self) -> None:
        if isinstance(self.engine, MovingEngine):
            self.engine.purge()
            return
        self.engine.settle()
        self.engine.scheduler.preempt_all()
        assert self.engine.allocator.reset()

    def check_answer(self, asked: Asked, resumed: dict[int, list[int]], request: Request) -> None:
        got = self.engine.answer(request)
        assert got.last is not None, f"{asked} was never answered"
        expected = self.expected[asked]
        for index, alone in enumerate(expected):
            if index in got.finished and got.finished[index].reason == "abort":
                assert self.aborted & {(request.key, None), (request.key, index)}, "nobody aborted it"
            tokens = resumed[index] + got.tokens.get(index, [])
            self.known += [[*asked.prompt_ids, *alone.token_ids], [*asked.prompt_ids, *tokens]]
            if _follows_a_tie(tokens, alone):
                continue
            assert tokens == alone.token_ids[: len(tokens)], f"choice {index} of {asked}: {tokens}, not {alone}"
            if isinstance(got.last, End) and got.finished[index].reason != "abort":
                assert (tokens, got.finished[index].reason) == (alone.token_ids, alone.reason)
        if isinstance(got.last, Failed):
            may_fail = any(alone.reason in ("no token", "not finite") for alone in expected)
            assert may_fail or (self.faults.any_step and got.last == FAILED), f"{asked} failed: {got.last}"
        if isinstance(got.last, End) and not asked.num_resumed and request.sampling.prompt_logprobs is not None:
            is_aborted = any(each.reason == "abort" for each in got.finished.values())
            assert is_aborted or got.prompt_logprobs is not None, "its prompt logprobs never came"
        if request.sampling.prompt_logprobs is not None and got.prompt_logprobs is not None:
            found = [position.logprob for position in got.prompt_logprobs.positions[1:]]
            assert self.model.logprobs_agree(found, expected[0].prompt_logprobs or [])

    def check_pool(self) -> None:
        """Check that every findable block holds what its hash stands for."""
        allocator = self.engine.allocator
        found: dict[BlockHash, BlockId] = {}
        if isinstance(allocator, HashAllocator):
            found = {each: allocator.block_of(each) or BlockId(0) for each in cached_hashes(allocator)}
        elif isinstance(allocator, RadixAllocator):
            for node in allocator.trie.nodes():
                found.update(zip(node.hashes, node.block_ids, strict=True))
        for token_ids in self.known:
            hashes = hash_chain(ROOT, token_ids, BLOCK_SIZE)
            if found.keys().isdisjoint(hashes):
                continue
            for block_hash, content in zip(hashes, self.model.blocks_alone(token_ids), strict=True):
                if (block_id := found.pop(block_hash, None)) is not None:
                    assert self.model.has_block(self.runner, block_id, content), "a block holds other tokens"
        assert not found, "a block of tokens that no choice has is findable"
        assert allocator.num_free_blocks == allocator.num_blocks - 1, "a block stays allocated"


def _follows_a_tie(token_ids: Sequence[int], alone: Alone) -> bool:
    """Return whether the first token that differs is at a place where the reference's two best are nearly equal."""
    pairs = enumerate(zip(token_ids, alone.token_ids, strict=False))
    return next((place in alone.ties for place, (token_id, other) in pairs if token_id != other), False)
