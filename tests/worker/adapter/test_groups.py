"""The published stops against vLLM's rule for a hit: evictions in any order, lost batches, restarts, reuse reports."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from cache.events import BlockEvent, Stops, Stored
from cache.hashing import hash_chain
from cache.types import BlockHash
from tests.worker.adapter.fake_blocks import OTHER, ROOT
from tests.worker.adapter.fake_groups import Group, GroupedEngine, Prompt
from tests.worker.adapter.published import Published
from worker.adapter.blocks import EngineBlocks
from worker.adapter.kv_events import BlockRemoved, BlockStored, Event

FULL, MLA = Group("full_attention", 2), Group("mla_attention", 2)
WINDOW = Group("sliding_window", 2, 5)
LAYOUTS = {
    "windows first": (WINDOW, Group("sliding_window", 2, 8), FULL),
    "one block": (FULL, Group("sliding_window_mla", 2, 2)),
    "longer window blocks": (FULL, Group("sliding_window", 4, 6)),
    "shorter window blocks": (Group("sliding_window", 2, 7), Group("full_attention", 4)),
    "states": (Group("mamba", 2), FULL),
    "states and windows": (FULL, WINDOW, Group("mamba", 4)),
    "two full": (WINDOW, FULL, Group("sink_full_attention", 4), MLA),
}
INCOMPLETE = ("shorter window blocks",)
"""Layouts in which an end may be missed: an event may omit a name inside a block of the tree."""


class GroupsMachine(RuleBasedStateMachine):
    groups: ClassVar[tuple[Group, ...]]
    block_size: ClassVar[int]
    eagle: ClassVar[bool] = False
    is_complete: ClassVar[bool] = True
    """The index misses no end of blocks that it was sent since the last gap."""

    @initialize(is_dense=st.booleans(), counts=st.booleans(), max_names=st.sampled_from((0, 1000)))
    def begin(self, is_dense: bool, counts: bool, max_names: int) -> None:
        self.engine = GroupedEngine(self.groups, self.eagle, is_dense, counts)
        kinds = {group.kind for group in self.groups}
        self.blocks = EngineBlocks(
            self.block_size,
            max_names=max_names,
            drops_last_block=self.eagle,
            expected_parts="states" if "mamba" in kinds else "windows",
        )
        self.prompts: list[Prompt] = []
        self.published = Published()

    @rule(
        data=st.data(),
        root=st.sampled_from((ROOT, ROOT, OTHER)),
        chunk=st.sampled_from((1, 2, 100)),
        reports=st.sampled_from((False, False, True)),
        rest=st.integers(0, 3),
    )
    def serve(self, data: st.DataObject, root: BlockHash, chunk: int, reports: bool, rest: int) -> None:
        """Serve a new prompt, or one that goes on from a part of an old one."""
        runs = data.draw(st.lists(st.integers(0, 1), max_size=8))
        tokens = tuple(token for token in runs for _ in range(2)) + (1,) * rest
        if self.prompts and data.draw(st.booleans()):
            root, before = data.draw(st.sampled_from(self.prompts))
            tokens = before[: data.draw(st.integers(0, len(before)))] + tokens
        if tokens:
            self.compute((root, tokens[:24]), chunk, reports)

    @rule(data=st.data(), reports=st.booleans())
    @precondition(lambda self: self.prompts)
    def serve_again(self, data: st.DataObject, reports: bool) -> None:
        self.compute(data.draw(st.sampled_from(self.prompts)), 100, reports)

    def compute(self, prompt: Prompt, chunk: int, reports: bool) -> None:
        if prompt not in self.prompts:
            self.prompts.append(prompt)
        self.engine.serve(prompt, chunk, reports=reports)
        self.apply()

    @rule(data=st.data(), count=st.integers(1, 6))
    @precondition(lambda self: self.engine.copies)
    def evict(self, data: st.DataObject, count: int) -> None:
        for _ in range(min(count, len(self.engine.copies))):
            self.engine.evict(data.draw(st.sampled_from(sorted(self.engine.copies))))
        self.apply()

    @rule(data=st.data(), evicts=st.booleans())
    @precondition(lambda self: self.prompts)
    def lose(self, data: st.DataObject, evicts: bool) -> None:
        """Events are lost, and the reader notices it with the next ones."""
        self.engine.serve(data.draw(st.sampled_from(self.prompts)), 100)
        if evicts and self.engine.copies:
            self.engine.evict(data.draw(st.sampled_from(sorted(self.engine.copies))))
        self.engine.lose_events()
        self.published.replay(self.blocks.forget_held())

    @rule(is_said=st.booleans())
    def restart(self, is_said: bool) -> None:
        self.engine.reset()
        if is_said:
            self.apply()
        else:
            self.engine.take_events()
            self.blocks.clear()
            self.published.clear()

    def apply(self) -> None:
        self.published.apply(self.blocks.apply(self.engine.take_events()))

    @invariant()
    def no_promise_exceeds_the_rule(self) -> None:
        if not hasattr(self, "engine"):
            return
        assert Published().replay(self.blocks.visible_events()) == self.published
        for root, tokens in self.prompts:
            for end in range(len(tokens) % 3 + 1, len(tokens) + 1, 3):
                for prompt in ((root, tokens[:end]), (root, (*tokens[:end], 7, 7, 7))):
                    chain = hash_chain(*prompt, self.block_size)
                    promised = self.published.stop(chain, self.block_size, len(prompt[1]))
                    found = self.engine.find(prompt)
                    assert promised == self.blocks.num_matched_tokens(chain, len(prompt[1]))
                    assert promised <= found, (prompt, promised, found)
                    engine = self.engine
                    if self.is_complete:
                        known = engine.last_end(prompt, engine.known)
                        assert promised >= known, (prompt, promised, known)
                        if not (engine.has_gap or engine.parted or engine.has_doubtful_events):
                            assert known == engine.last_end(prompt, engine.copies)
                            assert self.eagle or known == found


def machine_of(layout: str, block_size: int | None = None, **fields: object) -> type[GroupsMachine]:
    groups = LAYOUTS[layout]
    size = block_size or min(group.block_size for group in groups if group.is_full)
    return type("Machine", (GroupsMachine,), {"groups": groups, "block_size": size, **fields})


def run(layout: str, block_size: int | None = None, num_examples: int = 15, **fields: object) -> None:
    machine = machine_of(layout, block_size, **fields)
    run_machine(machine, settings=settings(max_examples=num_examples, stateful_step_count=15))


def evicted_without_counts(eagle: bool, num_tokens: int, blocks: Sequence[tuple[int, int]]) -> GroupsMachine:
    """Serve a prompt twice, with its first block evicted in between unless `eagle`. Then evict `blocks`."""
    machine = machine_of("one block", eagle=eagle)()
    machine.begin(is_dense=True, counts=False, max_names=1000)
    names = machine.engine.names((ROOT, (0,) * num_tokens), 2)
    machine.compute((ROOT, (0,) * num_tokens), 1, reports=False)
    if not eagle:
        machine.engine.evict((0, names[0]))
    machine.compute((ROOT, (0,) * num_tokens), 100, reports=False)
    for group, number in blocks:
        machine.engine.evict((group, names[number]))
    machine.apply()
    machine.no_promise_exceeds_the_rule()
    return machine


def test_a_report_after_a_copy_was_removed_is_one() -> None:
    """A copy of each window block is left, but of the first. A report names it nevertheless."""
    machine = evicted_without_counts(False, 8, [(1, 2), (1, 0), (1, 0)])
    machine.compute((ROOT, (0, 0, 0, 0, 0, 0, 7)), 100, reports=True)
    machine.no_promise_exceeds_the_rule()


def test_a_store_after_every_copy_was_removed_is_no_report() -> None:
    machine = evicted_without_counts(True, 16, [(1, 7), (1, 7), (1, 2), (0, 6), (0, 1), (0, 4)])
    machine.compute((ROOT, (0,) * 16), 100, reports=False)
    machine.no_promise_exceeds_the_rule()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_stops_are_those_of_the_rule(layout: str) -> None:
    run(layout, is_complete=layout not in INCOMPLETE)


@pytest.mark.parametrize("layout", ["windows first", "one block", "longer window blocks", "states"])
def test_an_engine_that_drops_the_last_block(layout: str) -> None:
    run(layout, eagle=True, is_complete=len({group.block_size for group in LAYOUTS[layout]}) == 1)


def first_part(num_tokens: int) -> list[Event]:
    """The first part of a long prompt: vLLM keeps no block of windows there."""
    names = tuple(range(num_tokens // 2))
    keys = ((ROOT.hex(),), *(None for _ in names[1:]))
    tokens = tuple(range(num_tokens))
    return [BlockStored(names, None, tokens, 2, "GPU", None, keys, 0, "full_attention")]


def test_no_window_has_come_no_end_is_promised() -> None:
    blocks = EngineBlocks(2, max_names=100, expected_parts="windows")
    assert blocks.ends == "exact"
    chain = hash_chain(ROOT, range(8), 2)
    assert blocks.apply(first_part(8)).events == [Stored(block_hash) for block_hash in chain]
    assert blocks.num_matched_tokens(chain, 9) == 0
    window = BlockStored((2, 3), None, (4, 5), 2, "GPU", None, (None, None), 1, "sliding_window", 5)
    assert blocks.apply([window]).events == [Stops(chain[-1], 4)]
    assert blocks.num_matched_tokens(chain, 9) == 8


def test_windows_that_an_engine_keeps_as_full_attention() -> None:
    """vLLM does so with --disable-hybrid-kv-cache-manager: then no group of windows ever comes."""
    blocks = EngineBlocks(2, max_names=100, expected_parts="windows")
    chain = hash_chain(ROOT, range(8), 2)
    blocks.apply(first_part(8))
    assert [event for _ in range(9) for event in blocks.record_prompt(8)] == [], "no batch came in between"
    events: list[BlockEvent] = []
    for _ in range(9):
        events += [*blocks.apply(first_part(8)).events, *blocks.record_prompt(2), *blocks.record_prompt(8)]
    assert sorted(event.num_blocks for event in events if isinstance(event, Stops)) == [1, 2, 3, 4]
    assert blocks.num_matched_tokens(chain, 9) == 8
    states = EngineBlocks(2, max_names=100, expected_parts="states")
    for _ in range(9):
        states.apply(first_part(8))
        assert states.record_prompt(8) == []
    assert states.num_matched_tokens(chain, 9) == 0


@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_any_block_size_of_the_index(block_size: int) -> None:
    run("windows first", block_size, is_complete=block_size == 1)


def test_more_copies_than_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.adapter.groups._MAX_COPIES", 2)
    run("windows first", is_complete=False)


@pytest.mark.parametrize("eagle", [False, True])
def test_events_that_no_engine_sends(eagle: bool) -> None:
    """Whatever comes, the published blocks and stops are those that a new epoch would publish."""
    rng = random.Random(eagle)
    for _ in range(20):
        blocks = EngineBlocks(rng.choice((1, 2, 3)), max_names=20, drops_last_block=eagle)
        published = Published()
        for _ in range(40):
            published.apply(blocks.apply([chaotic_event(rng) for _ in range(rng.randrange(1, 8))]))
            published.replay(blocks.forget_held() if rng.random() < 0.05 else ())
            assert Published().replay(blocks.visible_events()) == published


def chaotic_event(rng: random.Random) -> Event:
    names = tuple(rng.randrange(8) for _ in range(rng.randrange(1, 6)))
    group = rng.randrange(4)
    if rng.random() < 0.3:
        return BlockRemoved(names, "GPU", group, rng.choice((None, tuple(rng.randrange(2) for _ in names))))
    kind = rng.choice(("full_attention", "full_attention", "sliding_window", "mamba")) if group else "full_attention"
    size = rng.choice((2, 2, 2, 4, 3))
    tokens = tuple(rng.randrange(2) for _ in range(size * len(names) + rng.choice((0, 0, size))))
    salts = (rng.choice(((ROOT.hex(),), None)), *(None for _ in names[1:]))
    parent = rng.choice((None, names[0], rng.randrange(8)))
    return BlockStored(names, parent, tokens, size, "GPU", None, salts, group, kind, rng.choice((None, 1, 5)))


@pytest.mark.deep
@pytest.mark.parametrize("eagle", [False, True])
@pytest.mark.parametrize("block_size", [None, 1, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_stops_are_those_of_the_rule_for_long(layout: str, block_size: int | None, eagle: bool) -> None:
    sizes = {group.block_size for group in LAYOUTS[layout]}
    is_complete = block_size in (None, 1) and layout not in INCOMPLETE and (not eagle or len(sizes) == 1)
    run(layout, block_size, 300, eagle=eagle, is_complete=is_complete)
