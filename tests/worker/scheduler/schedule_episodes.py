"""Random schedules over exact arithmetic: every token is compared with that of the same choice alone.

The next token is a function of every token read back through the block table, and of the rules of the request. An
episode is drawn from a number, which a failure prints: `run_episode(number)` repeats it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any
from zlib import crc32

from cache.allocators import PREFIX_CACHES
from cache.allocators.hash import HashAllocator
from cache.allocators.radix import RadixAllocator
from cache.hashing import encode_tokens, hash_chain
from cache.stores.host import HostStore
from tests.worker.device_streams import LateStream, ThreadedStream
from tests.worker.kv_transfer.moving_engine import BLOCK_SIZE, PAYLOAD_BYTES, RECORD, MovingEngine
from tests.worker.scheduler.arithmetic_runner import GARBAGE, ArithmeticRunner
from tests.worker.scheduler.engine import FAILED, ROOT, HandEngine, generate
from worker.device import DeviceStream
from worker.engine.step import NoTokenLeft, Row, SamplingRow, SequenceResult, Step
from worker.scheduler.request import ConstraintError, Request
from worker.wire import End, Failed, Grammar, SamplingParams

VOCAB = 10
NONE_LEFT = -7
EOS = (3,)
LONGEST = 40
"""Prompt and output of a choice, in tokens: the smallest pool holds one."""


class Turning:
    """A grammar of `length` tokens, in which the token that is forbidden turns with those before."""

    def __init__(self, length: int, output_ids: Sequence[int] = ()) -> None:
        self.length, self.num_taken, self.state = length, 0, 0
        for token_id in output_ids:
            self.advance(token_id)

    @property
    def finished(self) -> bool:
        return self.num_taken >= self.length

    def allowed(self) -> object:
        return frozenset(range(VOCAB)) - {self.state % VOCAB}

    def allowed_along(self, draft_ids: Sequence[int]) -> Sequence[object]:
        scout = Turning(self.length)
        scout.num_taken, scout.state = self.num_taken, self.state
        masks = [scout.allowed()]
        for draft_id in draft_ids:
            if draft_id == scout.state % VOCAB:
                break
            scout.advance(draft_id)
            if scout.finished:
                break
            masks.append(scout.allowed())
        return masks

    def advance(self, token_id: int) -> None:
        if token_id == self.state % VOCAB or self.finished:
            raise ConstraintError(f"{token_id} does not follow")
        self.num_taken, self.state = self.num_taken + 1, self.state * 3 + token_id + 1


def choose(read: Sequence[int], params: SamplingParams, seed: int, output_ids: Sequence[int], allowed: Any) -> int:
    """Return the best token that the rules leave, or NONE_LEFT."""
    digest = crc32(encode_tokens(read) + seed.to_bytes(8, "little"))
    scores = {token_id: float(crc32(bytes([token_id]), digest) % 256) for token_id in range(VOCAB)}
    for token_id in scores:
        scores[token_id] += dict(params.logit_bias).get(token_id, 0.0)
        scores[token_id] -= 100 * params.frequency_penalty * output_ids.count(token_id)
    left = set(scores if params.allowed_token_ids is None else params.allowed_token_ids)
    left &= set(scores) if allowed is None else allowed
    for word in params.bad_words:
        if len(word) == 1 or tuple(output_ids[1 - len(word) :]) == word[:-1]:
            left.discard(word[-1])
    if len(output_ids) < params.min_tokens:
        left = left - {*EOS, *params.stop_token_ids} or left
    return max(left, key=lambda token_id: (scores[token_id], token_id), default=NONE_LEFT)


class RuledRunner(ArithmeticRunner):
    """Samples by the rules of each row, and raises for a row that counts and has no token left."""

    def _sample(self, read: Sequence[int], row: SamplingRow) -> int:
        output_ids = [*read[len(row.prompt_ids) :]]
        known_ids = [*row.output_ids, *row.draft_ids]
        assert output_ids[: len(known_ids)] == known_ids or GARBAGE in read, "the KV is of other tokens than the row"
        return choose(read, row.params, row.seed, output_ids, row.allowed)

    def compute(self, step: Step) -> list[SequenceResult]:
        results = super().compute(step)

        def sampled(row: Row) -> int:
            return results[row].sampled[0].token_id

        reached = step.reached_rows(sampled)
        if empty := [row for row in reached if any(token.token_id == NONE_LEFT for token in results[row].sampled)]:
            for sequence in step.sequences:
                for slot in sequence.slots:
                    self.kv[slot] = GARBAGE
            raise NoTokenLeft("the rules leave no token", empty)
        return results


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, when it comes, and when it is aborted."""

    step: int
    prompt_ids: list[int]
    max_tokens: int
    n: int
    num_resumed: int
    grammar_length: int | None
    abort_after: int | None
    aborts_first_choice: bool
    fields: dict[str, Any]

    def answer(self, index: int) -> tuple[list[int], str]:
        """Return the tokens of a choice alone, and why it ends."""
        params = generate(self.prompt_ids, self.max_tokens, **self.fields).sampling
        grammar = None if self.grammar_length is None else Turning(self.grammar_length)
        output_ids: list[int] = []
        while len(output_ids) < self.max_tokens:
            allowed = None if grammar is None else grammar.allowed()
            token_id = choose([*self.prompt_ids, *output_ids], params, 100 + index, output_ids, allowed)
            if token_id == NONE_LEFT:
                return output_ids, "no token"
            output_ids.append(token_id)
            if grammar is not None:
                grammar.advance(token_id)
            if len(output_ids) > params.min_tokens and token_id in (*EOS, *params.stop_token_ids):
                return output_ids, "stop"
            if grammar is not None and grammar.finished:
                return output_ids, "stop"
        return output_ids, "length"


def draw_request(rng: Random, num_steps: int) -> Asked:
    shared = ([0, 1, 0, 2] * 8)[: rng.choice([0, 0, 6, 12, 20])]
    prompt_ids = [*shared, *(rng.randrange(rng.choice([1, 2, VOCAB])) for _ in range(rng.randint(1, 8)))]
    fields: dict[str, Any] = {"tenant": rng.choice("aab"), "priority": rng.choice([0, 0, 0, 1, -1])}
    grammar_length = rng.randint(1, 14) if rng.random() < 0.15 else None
    if grammar_length is not None:
        fields["grammar"] = Grammar("regex", "x")
    if rng.random() < 0.4:
        fields["allowed_token_ids"] = tuple(rng.sample(range(VOCAB), rng.choice([1, 2, 2, 3])))
    if rng.random() < 0.2:
        few = fields.get("allowed_token_ids", range(VOCAB))
        words = [tuple(rng.choice(few) for _ in range(rng.choice([2, 2, 3]))) for _ in range(rng.randint(1, 5))]
        fields["bad_words"] = tuple(words)
    if rng.random() < 0.1:  # the prompt suggests a token that is never sampled, and behind which none is left
        sampled, suggested = rng.sample(range(VOCAB), 2)
        prompt_ids = [*prompt_ids[:20], sampled, sampled, suggested, sampled]
        fields["allowed_token_ids"] = (sampled, suggested)
        fields["bad_words"] = ((suggested, sampled), (suggested, suggested))
        fields["logit_bias"] = ((suggested, -300.0),)
    if rng.random() < 0.15:
        fields["frequency_penalty"] = rng.choice([-1.0, 0.25, 2.0])
    if rng.random() < 0.2:
        fields["stop_token_ids"] = (rng.randrange(VOCAB),)
    if rng.random() < 0.15:
        fields["min_tokens"] = rng.choice([1, 4, 20])
    if rng.random() < 0.1:
        fields["prompt_logprobs"] = 0
    return Asked(
        step=rng.randint(0, num_steps),
        prompt_ids=prompt_ids,
        max_tokens=rng.choice([0, 1, 3, 8, 12, 12]),
        n=rng.choice([1, 1, 1, 1, 2, 3]),
        num_resumed=rng.choice([0, 0, 0, 1, 4]),
        grammar_length=grammar_length,
        abort_after=rng.randint(0, 9) if rng.random() < 0.35 else None,
        aborts_first_choice=rng.random() < 0.3,
        fields=fields,
    )


def draw_plain_requests(rng: Random) -> list[Asked]:
    """Draw requests without rules, whose steps are launched ahead, and perhaps some that repeat themselves."""
    asked = []
    for _ in range(rng.randint(2, 6)):
        fields: dict[str, Any] = {}
        if rng.random() < 0.3:
            fields["allowed_token_ids"] = tuple(rng.sample(range(VOCAB), rng.choice([1, 2])))
        prompt_ids = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))]
        asked.append(Asked(rng.choice([0, 0, 1]), prompt_ids, 12, 1, 0, None, None, False, fields))
    return asked


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


def run_episode(number: int) -> None:
    """Draw an episode and run it. Raises AssertionError."""
    rng = Random(number)
    with stream_of(rng.choice(["none", "late", "late", "late", "threaded"])) as stream:
        _Episode(rng, stream).run()


class _Episode:
    def __init__(self, rng: Random, stream: DeviceStream | None) -> None:
        self.rng = rng
        self.failing = {rng.randrange(60) for _ in range(4)} if rng.random() < 0.2 else set()
        self.num_launched = 0
        num_steps = rng.choice([0, 4, 12])
        self.is_plain = rng.random() < 0.3
        asked = [draw_request(rng, num_steps) for _ in range(rng.randint(1, 7))]
        if self.is_plain:
            asked = draw_plain_requests(rng)
        if rng.random() < 0.4:
            asked += [asked[0]] * rng.randint(1, 2)
        self.left = sorted(asked, key=lambda one: one.step)
        self.asked = asked
        num_blocks = rng.choice([11, 12, 14, 20, 40])  # ten hold the longest choice
        prefix_cache = rng.choice(PREFIX_CACHES)
        self.runner = RuledRunner(num_blocks, BLOCK_SIZE, self.fails, stream)
        options: dict[str, Any] = {
            "num_blocks": num_blocks,
            "runner": self.runner,
            "async_scheduling": stream is not None and rng.random() < 0.8,
            "eos": EOS,
            "max_drafts": rng.choice([0, 1, 3, 6]),
            "max_num_seqs": 6 if self.is_plain else rng.choice([1, 2, 4, 6]),
            "max_num_batched_tokens": rng.choice([6, 10, 40, 40]),
            "watermark": rng.choice([0.0, 0.0, 0.1, 0.4]),
            "waiting_served_ratio": rng.choice([None, None, 0.5, 1.2]),
            "max_waiting_tokens": 4,
            "max_batch_total_tokens": rng.choice([None, None, 60]),
        }
        self.in_flight = stream is not None and rng.random() < 0.7
        self.reset_at = rng.randint(1, 20) if rng.random() < 0.15 else None
        self.stores = prefix_cache == "hash" and rng.random() < 0.4
        self.engine: HandEngine
        if self.stores:
            store = HostStore([memoryview(bytearray(12 * PAYLOAD_BYTES))], PAYLOAD_BYTES)
            self.engine = MovingEngine([store], {}, rng, RECORD, **options)
        else:
            self.engine = HandEngine(block_size=BLOCK_SIZE, prefix_cache=prefix_cache, **options)
        self.live: list[tuple[Asked, dict[int, list[int]], int, Request]] = []
        self.step = 0

    def fails(self, step: Step) -> bool:
        self.num_launched += 1
        return self.num_launched in self.failing

    def run(self) -> None:
        """Run all steps, and check every answer and the pool."""
        engine = self.engine
        while self.left or engine.scheduler.has_work or engine.in_flight:
            if not self.in_flight:
                self.submit_and_abort()
            if self.step == self.reset_at:
                self.reset()
            self.take_step()
            self.step += 1
            assert self.step < 1500, "no end in sight"
        if isinstance(engine, MovingEngine):
            engine.transfers.loads.give_up_all()
        engine.finish()
        for asked, resumed, _, request in self.live:
            self.check_answer(asked, resumed, request)
        ends = [asked.answer(index)[1] for asked in self.asked for index in range(asked.n)]
        assert self.failing or "no token" in ends or not engine.num_failed_steps, "a step failed for nothing"
        self.check_pool()
        if isinstance(engine, MovingEngine):
            engine.transfers.close()

    def take_step(self) -> None:
        engine, has_work = self.engine, self.engine.scheduler.has_work
        plan = engine.step(self.submit_and_abort if self.in_flight else lambda: None)
        if plan is None and has_work:
            has_loads = isinstance(engine, MovingEngine) and engine.transfers.loads.num_active > 0
            assert has_loads, "work is left but nothing was scheduled"
        held = {block_id for allocation in engine.allocator._live for block_id in allocation.block_table}
        assert len(held) + engine.allocator.num_free_blocks == engine.allocator.num_blocks - 1, (
            "blocks held in no table"
        )
        if isinstance(engine, MovingEngine):
            engine.move_blocks(4)

    def submit_and_abort(self) -> None:
        while self.left and self.left[0].step <= self.step:
            asked = self.left.pop(0)
            answers = {index: asked.answer(index)[0] for index in range(asked.n)}
            resumed = {index: tokens[: asked.num_resumed * (1 + index)] for index, tokens in answers.items()}
            wire = generate(asked.prompt_ids, asked.max_tokens, asked.n, resumed=resumed, **asked.fields)
            constraints = {}
            if asked.grammar_length is not None:
                constraints = {i: Turning(asked.grammar_length, tokens) for i, tokens in resumed.items()}
            self.live.append((asked, resumed, self.step, self.engine.submit(wire, constraints)))
        for asked, _, since, request in self.live:
            if asked.abort_after == self.step - since:
                self.engine.abort(request, 0 if asked.aborts_first_choice else None)
        chunks = self.engine.in_flight[0][0].chunks.values() if self.engine.in_flight else ()
        drafting = [chunk.sequence.request for chunk in chunks if chunk.draft_ids]
        if len(drafting) == 1 and self.rng.random() < 0.3:  # it alone has drafts, and the step that verifies them runs
            self.engine.abort(drafting[0])

    def reset(self) -> None:
        if isinstance(self.engine, MovingEngine):
            self.engine.purge()
            return
        self.engine.settle()
        self.engine.scheduler.preempt_all()
        assert self.engine.allocator.reset()

    def check_answer(self, asked: Asked, resumed: dict[int, list[int]], request: Request) -> None:
        got = self.engine.answer(request)
        ends = {index: asked.answer(index) for index in range(asked.n)}
        for index, (expected, reason) in ends.items():
            tokens = resumed[index] + got.tokens.get(index, [])
            assert tokens == expected[: len(tokens)], f"choice {index} of {asked}: {tokens}, not {expected}"
            if isinstance(got.last, End) and got.finished[index].reason != "abort":
                assert (tokens, got.finished[index].reason) == (expected, reason)
        if isinstance(got.last, Failed):
            may_fail = any(reason == "no token" for _, reason in ends.values())
            assert may_fail or (self.failing and got.last == FAILED), f"{asked} failed: {got.last}"
        if request.sampling.prompt_logprobs is not None and got.prompt_logprobs is not None:
            found = [position.logprob for position in got.prompt_logprobs.positions[1:]]
            assert found == [-float(token_id) for token_id in asked.prompt_ids[1:]]

    def check_pool(self) -> None:
        """Check that every findable block holds the tokens of its hash."""
        allocator, known = self.engine.allocator, {}
        for asked in self.asked:
            for index in range(asked.n):
                token_ids = [*asked.prompt_ids, *asked.answer(index)[0]]
                for place, block_hash in enumerate(hash_chain(ROOT, token_ids, BLOCK_SIZE)):
                    known[block_hash] = token_ids[place * BLOCK_SIZE :][:BLOCK_SIZE]
        found: dict[bytes, int] = {}
        if isinstance(allocator, HashAllocator):
            found = {each: allocator.block_of(each) or 0 for each in allocator.cached_hashes()}
        elif isinstance(allocator, RadixAllocator):
            for node in allocator.trie.nodes():
                found.update(zip(node.hashes, node.block_ids, strict=True))
        for block_hash, block_id in found.items():
            assert block_hash in known, "a block of tokens that no choice has is findable"
            first = block_id * BLOCK_SIZE
            assert self.runner.kv[first : first + BLOCK_SIZE] == known[block_hash], "a block holds other tokens"
        assert allocator.num_free_blocks == allocator.num_blocks - 1, "a block stays allocated"
