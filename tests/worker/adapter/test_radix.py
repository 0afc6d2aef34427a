"""The mirror of SGLang's radix cache: what is promised is found, for tenants, adapters, evictions, losses, EAGLE."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from cache.hashing import hash_chain
from cache.types import BlockHash
from tests.fake_engine.radix import RadixCache, Space, pack
from tests.worker.adapter.fake_blocks import OTHER, ROOT
from tests.worker.adapter.published import Published
from worker.adapter.blocks import EngineBlocks
from worker.adapter.kv_events import decode_batch

PIRATE, LAWYER = BlockHash(b"P" * 16), BlockHash(b"L" * 16)
ADAPTERS = {PIRATE: "pirate", LAWYER: "lawyer"}
"""A gateway's root depends on the adapter."""
ROOTS = (ROOT, OTHER, PIRATE, LAWYER)
Prompt = tuple[BlockHash, tuple[int, ...]]


class RadixMachine(RuleBasedStateMachine):
    page_size: ClassVar[int]
    block_size: ClassVar[int]
    has_pairs: ClassVar[bool]

    @initialize(max_names=st.sampled_from((0, 3, 1000)))
    def begin(self, max_names: int) -> None:
        self.engine = RadixCache(self.page_size, self.has_pairs)
        self.blocks = EngineBlocks(self.block_size, max_names=max_names)
        self.numbers = count()
        self.loads = {name: f"{next(self.numbers):032x}" for name in ADAPTERS.values()}
        self.running: list[tuple[Prompt, Space]] = []
        self.prompts: list[Prompt] = []
        self.published = Published()
        self.is_exact = True

    def space(self, root: BlockHash) -> Space:
        name = ADAPTERS.get(root)
        return Space(root.hex(), name, None if name is None else self.loads[name])

    @rule(
        data=st.data(),
        root=st.sampled_from(ROOTS),
        session=st.sampled_from((None, "s")),
        num_output=st.integers(0, 5),
        goes_on=st.booleans(),
        ends=st.booleans(),
    )
    def serve(
        self, data: st.DataObject, root: BlockHash, session: str | None, num_output: int, goes_on: bool, ends: bool
    ) -> None:
        """Serve a prompt, new or a part of an old one and more. It is kept at its prefill and at its end."""
        tokens = tuple(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=4 * self.page_size + 2)))
        if self.prompts and goes_on:
            root, before = data.draw(st.sampled_from(self.prompts))
            tokens = before[: data.draw(st.integers(0, len(before)))] + tokens
        self.prompts.append((root, tokens))
        self.engine.insert(tokens, self.space(root), session)
        answered = (root, tokens + (1,) * num_output)
        if ends:
            self.engine.insert(answered[1], self.space(root), session)
            self.prompts.append(answered)
        else:
            self.running.append((answered, self.space(root)))
        self.apply()

    @rule(data=st.data())
    @precondition(lambda self: self.running)
    def end(self, data: st.DataObject) -> None:
        """End a request, maybe of an adapter that has been unloaded since."""
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.engine.insert(request[0][1], request[1])
        self.prompts.append(request[0])
        self.apply()

    @rule(root=st.none() | st.just("no salt"))
    def bypass(self, root: str | None) -> None:
        """Requests that bypass the gateway have no salt of its."""
        self.engine.insert((0, 1) * 2 * self.page_size, Space(root))
        self.apply()

    @rule(num_pages=st.integers(1, 6), data=st.data())
    @precondition(lambda self: self.engine.pages)
    def evict(self, num_pages: int, data: st.DataObject) -> None:
        for _ in range(num_pages):
            self.evict_one(data)
        self.apply()

    def evict_one(self, data: st.DataObject) -> None:
        """Evict a leaf that no running request holds."""
        locked = {name for (_, tokens), space in self.running for name in self.engine.names(tokens, space)}
        if leaves := [name for name in self.engine.leaves() if name not in locked]:
            self.engine.evict(data.draw(st.sampled_from(leaves)))

    @rule(data=st.data())
    @precondition(lambda self: self.engine.pages)
    def lose(self, data: st.DataObject) -> None:
        """A batch is lost, and the reader notices it with the next one."""
        if self.prompts:
            root, tokens = data.draw(st.sampled_from(self.prompts))
            self.engine.insert(tokens, self.space(root))
        self.evict_one(data)
        self.engine.take_events()
        self.is_exact = False
        self.published.replay(self.blocks.forget_held())

    @rule(name=st.sampled_from(tuple(ADAPTERS.values())))
    def reload(self, name: str) -> None:
        """An adapter is unloaded and loaded again, with other weights: no request finds its old pages.

        Its running requests go on. Events show no load of an adapter, so these have stored their first pages.
        """
        self.running = [
            each
            for each in self.running
            if each[1].lora_name != name or self.engine.num_found((*each[0][1], 0), each[1])
        ]
        self.loads[name] = f"{next(self.numbers):032x}"
        self.published.replay(self.blocks.forget_adapters([name]))

    @rule(is_said=st.booleans())
    def restart(self, is_said: bool) -> None:
        self.engine.reset()
        self.running = []
        if is_said:
            self.apply()
        else:
            self.engine.take_events()
            self.blocks.clear()
            self.published.clear()
        self.is_exact = True

    def apply(self) -> None:
        self.published.apply(self.blocks.apply(decode_batch(pack(1.0, self.engine.take_events())).events))

    def promise(self, chain: Sequence[BlockHash], num_prompt_tokens: int) -> int:
        """Return what a gateway promises."""
        if self.blocks.ends:
            return self.published.stop(chain, self.block_size, num_prompt_tokens)
        num_tokens = min(self.published.num_matched(chain) * self.block_size, num_prompt_tokens - 1)
        return num_tokens - num_tokens % self.page_size

    @invariant()
    def promised_is_found(self) -> None:
        if not hasattr(self, "engine"):
            return
        assert Published().replay(self.blocks.visible_events()) == self.published
        for tokens in {tokens for _, tokens in self.prompts[-8:]}:
            for prompt in (tokens, (*tokens, 0), (*tokens, 1, 1), tokens[: len(tokens) // 2 + 1], tokens[:-1]):
                if not prompt:
                    continue
                for each in ROOTS:
                    chain = hash_chain(each, prompt, self.block_size)
                    promised = self.promise(chain, len(prompt))
                    found = self.engine.num_found(prompt, self.space(each))
                    assert promised <= found, (prompt, promised, found)
                    assert promised == self.blocks.num_matched_tokens(chain, len(prompt))
                    if self.is_exact:
                        lost = self.page_size + self.block_size - 1  # by rounding down to both
                        lost += lost if self.has_pairs else 0
                        assert found - promised <= lost, (each, prompt, promised, found)


SIZES = ((1, 4), (4, 4), (2, 4), (4, 2), (3, 2), (1, 1))
"""Tokens in a page, and in a block of the index."""


def machine(page_size: int, block_size: int, has_pairs: bool) -> type[RadixMachine]:
    fields = {"page_size": page_size, "block_size": block_size, "has_pairs": has_pairs}
    return type("Machine", (RadixMachine,), fields)


@pytest.mark.parametrize("has_pairs", [False, pytest.param(True, marks=pytest.mark.e2e)])
@pytest.mark.parametrize("sizes", SIZES)
def test_promised_is_found(sizes: tuple[int, int], has_pairs: bool) -> None:
    run_machine(machine(*sizes, has_pairs), settings=settings(max_examples=20, stateful_step_count=20, deadline=None))


@pytest.mark.deep
@pytest.mark.parametrize("has_pairs", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_promised_is_found_deep(sizes: tuple[int, int], has_pairs: bool) -> None:
    run_machine(machine(*sizes, has_pairs), settings=settings(max_examples=2000, stateful_step_count=40, deadline=None))
