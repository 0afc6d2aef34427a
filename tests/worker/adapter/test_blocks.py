"""EngineBlocks against a simulated engine: copies, evictions in any order, lost batches, restarts, resets and salts.

It removes as vLLM does, and as changes to vLLM propose; it may report what it reuses, and evict without a word.

The fake engine keeps the blocks that it holds, which are the truth. Its block sizes map onto ours in every way. A
prompt is made of half blocks, so blocks share their first halves.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from cache.events import Removed, Stored
from cache.hashing import hash_chain
from cache.types import BlockHash
from tests.block_events import replay
from tests.worker.adapter.fake_blocks import (
    CAT,
    DOG,
    LORA_ROOTS,
    LORAS,
    MORE,
    OTHER,
    REMOVALS,
    ROOT,
    ROOTS,
    FakeEngine,
    Removals,
    our_chain,
    stored,
)
from worker.adapter.blocks import EngineBlocks
from worker.adapter.kv_events import AllBlocksCleared, BlockRemoved, Event

DEEP_STEPS = 20_000


def check_prefixes(published: set[BlockHash], parents: dict[BlockHash, BlockHash]) -> None:
    roots = {*ROOTS, *LORA_ROOTS.values()}
    assert all(parents[block_hash] in published or parents[block_hash] in roots for block_hash in published)


class BlocksMachine(RuleBasedStateMachine):
    engine_block_size: ClassVar[int]
    block_size: ClassVar[int]

    @initialize(max_names=st.sampled_from((0, 3, 1000)), removals=st.sampled_from(REMOVALS))
    def begin(self, max_names: int, removals: Removals) -> None:
        self.engine = FakeEngine(self.engine_block_size, removals)
        self.blocks = EngineBlocks(self.block_size, max_names=max_names)
        self.prompts: list[tuple[list[int], BlockHash | None, str | None]] = []
        self.published: set[BlockHash] = set()
        self.parents: dict[BlockHash, BlockHash] = {}
        self.is_exact = self.is_exact_since_reset = True
        """No batch was lost since the last reset, and no removal was of one copy among others."""
        self.is_honest = True
        """The engine has reported every eviction."""

    @property
    def unit(self) -> int:
        """Prompts are made of runs of as many equal tokens."""
        return self.engine_block_size // 2

    @rule(
        data=st.data(),
        lora=st.sampled_from((None, None, *LORAS)),
        root=st.sampled_from((*ROOTS, *ROOTS[:2])),
        copy_from=st.sampled_from((None, None, 0, 1, 2)),
        go_on=st.booleans(),
    )
    def serve(
        self, data: st.DataObject, root: BlockHash | None, lora: str | None, copy_from: int | None, go_on: bool
    ) -> None:
        """Serve a new prompt, or one that goes on from an old one."""
        if root is not None and lora is not None:
            root = LORA_ROOTS[lora]
        most = max(8, 3 * self.block_size // self.unit)
        runs = data.draw(st.lists(st.sampled_from((0, 1, 0, 1, CAT, DOG, MORE)), min_size=1, max_size=most))
        tokens = [token for run in runs for token in (run, *[run if run >= 0 else MORE] * (self.unit - 1))]
        if self.prompts and go_on:
            before, root, lora = data.draw(st.sampled_from(self.prompts))
            kept = data.draw(st.integers(0, len(before) // self.unit)) * self.unit
            tokens = before[:kept] + tokens
        self.compute(tokens, root, lora, copy_from)

    @rule(data=st.data(), copy_from=st.sampled_from((None, 0, 1)))
    @precondition(lambda self: self.prompts)
    def serve_again(self, data: st.DataObject, copy_from: int | None) -> None:
        self.compute(*data.draw(st.sampled_from(self.prompts)), copy_from)

    @rule(data=st.data(), in_order=st.sampled_from((True, True, True, False)), count=st.integers(1, 6))
    def evict(self, data: st.DataObject, in_order: bool, count: int) -> None:
        """Evict blocks, mostly the leaves first."""
        for _ in range(min(count, sum(self.engine.copies.values()))):
            keys = self.engine.leaves() if in_order else list(self.engine.copies)
            num_left = self.engine.evict(data.draw(st.sampled_from(keys)))
            if num_left and self.engine.removals == "each":
                self.is_exact = self.is_exact_since_reset = False

    @rule(data=st.data())
    @precondition(lambda self: self.prompts)
    def report_reuse(self, data: st.DataObject) -> None:
        self.engine.report_reuse(*data.draw(st.sampled_from(self.prompts)))

    @rule(data=st.data())
    @precondition(lambda self: self.engine.copies)
    def evict_in_silence(self, data: st.DataObject) -> None:
        """Make an entry wrong: the engine drops a block without an event."""
        self.publish()
        del self.engine.copies[data.draw(st.sampled_from(list(self.engine.copies)))]
        self.is_exact = self.is_honest = False

    @rule(data=st.data(), computes_before=st.booleans())
    @precondition(lambda self: self.prompts)
    def answer(self, data: st.DataObject, computes_before: bool) -> None:
        """An answer reports how much of its prompt was found. After it, the promise is at most that."""
        tokens, root, lora = data.draw(st.sampled_from(self.prompts))
        if root is None:
            return
        self.publish()
        chain = our_chain(root, tokens, self.block_size)
        at_batch, num_promised = self.blocks.num_batches, self.blocks.num_matched_tokens(chain, len(tokens))
        num_found = self.engine.num_found(tokens, root, lora)
        if computes_before:
            self.engine.serve(tokens, root, lora, None)
            self.publish()
        if num_found < num_promised:
            assert not self.is_honest
            replay(self.blocks.remove_missing(chain, num_found, at_batch), self.published)
        self.check()
        assert self.blocks.num_matched_tokens(chain, len(tokens)) <= self.engine.num_found(tokens, root, lora)

    @rule()
    def publish(self) -> None:
        """The step ends, and its batch arrives."""
        applied = self.blocks.apply(self.engine.take_events())
        if applied.cleared:
            self.published = set()
            self.is_exact, self.is_honest = self.is_exact_since_reset, True
        for event in applied.events:  # each is a change
            assert isinstance(event, Stored | Removed)
            assert (event.block_hash in self.published) is isinstance(event, Removed)
            replay([event], self.published)
        self.check()

    @rule(num_events=st.integers(0, 3))
    def lose(self, num_events: int) -> None:
        """The step's batch is lost, and no replay brings it back; the next one has `num_events` of its events."""
        events = self.engine.take_events()
        reset = any(isinstance(event, AllBlocksCleared) for event in events)
        kept = [] if reset else events[len(events) - num_events :]
        self.is_exact, self.is_honest = False, True
        replay(self.blocks.forget_held(), self.published)
        assert not self.published
        assert self.blocks.tree.num_held == 0
        self.engine.events = kept

    @rule()
    def reset(self) -> None:
        self.engine.reset()
        self.is_exact_since_reset = True

    @rule()
    def restart(self) -> None:
        self.engine.copies = {}
        self.engine.take_events()
        self.blocks.clear()
        self.published = set()
        self.is_exact = self.is_honest = True

    @rule()
    def replace_everything(self) -> None:
        """Enough traffic: all that is held goes, so the mirror is right again, and every prompt comes back."""
        if not self.is_honest:
            self.restart()
        self.publish()
        for key, copies in list(self.engine.copies.items()):
            for _ in range(copies):
                self.engine.evict(key)
        self.publish()
        assert not self.published
        assert self.blocks.tree.num_held == self.blocks.tree.num_opaque == 0
        self.is_exact = True
        for prompt in self.prompts:
            self.compute(*prompt, None)
        self.publish()

    def compute(self, tokens: list[int], root: BlockHash | None, lora: str | None, copy_from: int | None) -> None:
        self.prompts = [*self.prompts[-9:], (tokens, root, lora)]
        if root is not None:
            chain = [root, *our_chain(root, tokens, self.block_size)]
            self.parents |= zip(chain[1:], chain[:-1], strict=True)
        self.engine.serve(tokens, root, lora, copy_from)

    def check(self) -> None:
        held = self.engine.held(self.block_size)
        assert self.published <= held or not self.is_honest
        assert self.published == replay(self.blocks.visible_events())
        check_prefixes(self.published, self.parents)
        if self.is_exact:
            assert self.published == held
            assert self.blocks.tree.num_held == len(self.engine.copies)
            assert self.blocks.tree.num_opaque == sum(
                self.engine.blocks[key].root is None for key in self.engine.copies
            )


SIZES = [(16, 16), (24, 16), (32, 16), (48, 16), (64, 16), (128, 16), (16, 24), (16, 64), (32, 48), (32, 24), (2, 3)]


def run_machine(engine_block_size: int, block_size: int, num_steps: int) -> None:
    sizes = {"engine_block_size": engine_block_size, "block_size": block_size}
    machine = type("Machine", (BlocksMachine,), sizes)
    run_state_machine_as_test(machine, settings=settings(max_examples=max(25, num_steps // 50), stateful_step_count=30))


@pytest.mark.parametrize(("engine_block_size", "block_size"), SIZES)
def test_published_is_what_the_engine_holds(engine_block_size: int, block_size: int) -> None:
    run_machine(engine_block_size, block_size, 1500)


@pytest.mark.deep
@pytest.mark.parametrize(("engine_block_size", "block_size"), SIZES)
def test_published_is_what_the_engine_holds_for_long(engine_block_size: int, block_size: int) -> None:
    run_machine(engine_block_size, block_size, DEEP_STEPS)


SALTED = ((ROOT.hex(),),)


def test_a_block_behind_a_parent_proves_all_its_ancestors() -> None:
    blocks = EngineBlocks(2, max_names=100)
    blocks.apply([stored(*range(50), extra=SALTED + (None,) * 49)])
    blocks.forget_held()
    (event,) = blocks.apply([stored(50, parent=24, tokens=(7, 7))]).events[25:]
    held = hash_chain(ROOT, range(50), 2)
    assert replay(blocks.visible_events()) == {*held, event.block_hash}  # type: ignore[union-attr]
    assert blocks.tree.num_held == 26


def test_a_chain_of_any_depth_goes_and_comes_back() -> None:
    """Deeper than the interpreter's stack."""
    depth = 5000
    blocks = EngineBlocks(1, max_names=depth)
    for key in range(depth):
        blocks.apply([stored(key, parent=key - 1 if key else None, tokens=(1,), size=1, extra=None if key else SALTED)])
    assert len(blocks.apply([BlockRemoved((0,))]).events) == depth
    assert len(blocks.apply([stored(0, tokens=(1,), size=1, extra=SALTED)]).events) == depth
    assert len(blocks.forget_held()) == depth
    assert len(blocks.apply([stored(depth, parent=depth - 1, tokens=(1,), size=1)]).events) == depth + 1


@pytest.mark.parametrize(
    ("lora_name", "first", "second", "num_published"),
    [
        (None, (ROOT.hex(),), None, 2),
        (None, (ROOT.hex(),), (), 2),
        (None, None, None, 0),
        (None, (), None, 0),
        (None, ("salt",), None, 0),
        (None, (ROOT.hex().upper().replace("4", "A"),), None, 0),
        (None, (["image", 0],), None, 0),
        (None, (["image", "0"], ROOT.hex()), None, 0),
        (None, (["image", 0, 1], ROOT.hex()), None, 0),
        (None, (ROOT.hex(), ["image", 0]), None, 0),
        ("lora", (["image", 0], "lora", ROOT.hex()), ("lora",), 0),
        (None, (ROOT.hex(), "embeddings"), None, 0),
        (None, (ROOT.hex(),), (["image", 3],), 1),
        (None, (ROOT.hex(),), (None,), 1),
        ("lora", ("lora", ROOT.hex()), ("lora",), 2),
        ("lora", (ROOT.hex(), "lora"), ("lora",), 0),
        ("lora", (ROOT.hex(),), ("lora",), 0),
        (ROOT.hex(), (ROOT.hex(),), (ROOT.hex(),), 0),
        (ROOT.hex(), (ROOT.hex(), OTHER.hex()), (ROOT.hex(),), 2),
        ("lora", ("lora", ROOT.hex()), ("other",), 1),
    ],
)
def test_only_blocks_with_a_salt_and_nothing_else_are_published(
    lora_name: str | None, first: tuple[object, ...] | None, second: tuple[object, ...] | None, num_published: int
) -> None:
    blocks = EngineBlocks(2, max_names=100)
    events = blocks.apply([stored(1, 2, extra=(first, second), lora_name=lora_name)]).events
    root = OTHER if num_published and first is not None and OTHER.hex() in first else ROOT
    assert replay(events) == set(hash_chain(root, range(4), 2)[:num_published])
    assert (blocks.tree.num_held, blocks.tree.num_opaque) == (2, 2 - num_published)
    assert blocks.apply([stored(3, parent=2, tokens=(5, 5))]).events == [
        Stored(hash_chain(ROOT if root is ROOT else OTHER, [0, 1, 2, 3, 5, 5], 2)[2]) for _ in range(num_published == 2)
    ]


def test_an_event_with_a_wrong_number_of_tokens_is_opaque() -> None:
    """So is one with a wrong number of keys."""
    blocks = EngineBlocks(2, max_names=100)
    assert blocks.apply([stored(1, 2, tokens=(1, 2, 3), extra=(*SALTED, None))]).events == []
    assert blocks.apply([stored(3, 4, extra=SALTED)]).events == []
    assert blocks.tree.num_opaque == 4


def test_a_block_after_an_unknown_one_is_an_orphan() -> None:
    """It stays one until it is stored with its parents."""
    blocks = EngineBlocks(2, max_names=100)
    assert blocks.apply([stored(2, parent=1, tokens=(2, 3)), stored(3, parent=2, tokens=(4, 5))]).events == []
    assert (blocks.tree.num_opaque, blocks.tree.num_held) == (2, 2)
    chain = hash_chain(ROOT, range(6), 2)
    assert replay(blocks.apply([stored(1, 2, extra=(*SALTED, None))]).events) == set(chain[:2])
    assert replay(blocks.apply([stored(3, parent=2, tokens=(4, 5))]).events) == {chain[2]}
    assert blocks.tree.num_opaque == 0
    assert blocks.apply([BlockRemoved((3,))]).events == [Removed(chain[2])]


def test_a_removal_that_tells_of_other_copies_ends_nothing() -> None:
    blocks = EngineBlocks(2, max_names=100)
    blocks.apply([stored(1, 2, extra=(*SALTED, None))])
    assert blocks.apply([BlockRemoved((1, 2), remaining_copy_counts=(2, 1))]).events == []
    assert len(blocks.apply([BlockRemoved((1, 2), remaining_copy_counts=(1, 0))]).events) == 1
    assert len(blocks.apply([BlockRemoved((1,), remaining_copy_counts=(0,))]).events) == 1


def test_a_copy_after_a_removal_is_marked_held_again() -> None:
    """The next block stored after it shows that it is held."""
    blocks = EngineBlocks(2, max_names=100)
    blocks.apply([stored(1, 2, extra=(*SALTED, None)), stored(1, 2, extra=(*SALTED, None))])
    assert len(blocks.apply([BlockRemoved((2,))]).events) == 1
    assert len(blocks.apply([stored(3, parent=2, tokens=(5, 6))]).events) == 2


def test_an_answer_removes_blocks_that_it_has_not_found() -> None:
    """Blocks that were stored since the promise stay."""
    blocks = EngineBlocks(2, max_names=100)
    chain = hash_chain(ROOT, range(8), 2)
    blocks.apply([stored(1, 2, 3, 4, extra=(*SALTED, None, None, None))])
    at_batch = blocks.num_batches
    assert blocks.remove_missing(hash_chain(OTHER, range(8), 2), 2, at_batch) == []
    removed = blocks.remove_missing(chain, 2, at_batch)
    assert removed == [Removed(block_hash) for block_hash in reversed(chain[1:])]
    assert blocks.tree.num_held == 1
    blocks.apply([stored(2, 3, 4, parent=1, tokens=range(2, 8))])
    assert blocks.remove_missing(chain, 2, at_batch) == [], "stored since, by that very request"
    assert replay(blocks.visible_events()) == set(chain)


def test_a_name_behind_two_parents_is_published_for_neither() -> None:
    """An engine that names a page by its own tokens does so."""
    blocks = EngineBlocks(2, max_names=100)
    blocks.apply([stored(1, 2, 3, extra=(*SALTED, None, None))])
    events = blocks.apply([stored(2, parent=3, tokens=(2, 3))]).events
    assert [type(event) for event in events] == [Removed, Removed]
    assert replay(blocks.visible_events()) == set(hash_chain(ROOT, range(2), 2))
    assert blocks.apply([stored(2, parent=1, tokens=(2, 3))]).events == []


@pytest.mark.parametrize(
    "event",
    [
        stored(9, extra=SALTED, group_idx=1),
        stored(9, extra=SALTED, group_idx=1, kv_cache_spec_kind="chunked_local_attention"),
        stored(9, extra=SALTED, group_idx=1, kv_cache_spec_kind="sliding_window"),
        stored(9, extra=SALTED, group_idx=0, kv_cache_spec_kind="sliding_window"),
    ],
    ids=["no kind", "unknown kind", "no window", "of the tree"],
)
def test_a_group_without_a_known_rule_ends_it(event: Event) -> None:
    blocks = EngineBlocks(2, max_names=100)
    held = blocks.apply([stored(1, 2, extra=(*SALTED, None), kv_cache_spec_kind="mla_attention")]).events
    assert len(held) == 2
    assert blocks.problem is None
    assert blocks.apply([event]).events == [Removed(stored.block_hash) for stored in reversed(held)]  # type: ignore[union-attr]
    assert "groups" in (blocks.problem or "")
    assert blocks.apply([stored(1, 2, extra=(*SALTED, None))]).events == blocks.visible_events() == []


def test_other_tiers_do_not_count() -> None:
    blocks = EngineBlocks(2, max_names=100)
    assert blocks.apply([stored(1, extra=SALTED, medium="CPU")]).events == []
    assert len(blocks.apply([stored(1, extra=SALTED)]).events) == 1
    assert blocks.apply([BlockRemoved((1,), "CPU")]).events == []
    assert len(blocks.apply([BlockRemoved((1,), "GPU")]).events) == 1


def test_names_are_bounded() -> None:
    blocks = EngineBlocks(2, max_names=10)
    for key in range(100):
        blocks.apply([stored(key, tokens=(key, key), extra=SALTED)])
    blocks.forget_held()
    assert blocks.apply([stored(200, parent=89, tokens=(1, 1))]).events == []  # forgotten: an orphan
    assert len(blocks.apply([stored(201, parent=95, tokens=(1, 1))]).events) == 2


@pytest.mark.parametrize(
    ("engine_block_size", "block_size", "num_prompt_tokens", "expected"),
    [(2, 2, 9, 8), (2, 2, 8, 6), (4, 2, 8, 4), (2, 4, 12, 10), (3, 2, 8, 6), (8, 2, 8, 0), (8, 2, 9, 8), (2, 2, 1, 0)],
)
def test_matched_tokens_are_those_of_whole_blocks_of_the_engine(
    engine_block_size: int, block_size: int, num_prompt_tokens: int, expected: int
) -> None:
    blocks = EngineBlocks(block_size, max_names=100)
    tokens = list(range(24))
    num_blocks = 24 // engine_block_size
    blocks.apply(
        [stored(*range(num_blocks), tokens=tokens, size=engine_block_size, extra=SALTED + (None,) * (num_blocks - 1))]
    )
    hashes = hash_chain(ROOT, tokens[:num_prompt_tokens], block_size)
    assert blocks.num_matched_tokens(hashes, num_prompt_tokens) == expected
    assert blocks.num_matched_tokens(hash_chain(OTHER, tokens, block_size), 24) == 0
