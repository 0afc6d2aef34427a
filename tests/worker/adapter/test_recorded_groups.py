"""EngineBlocks against events that vLLM 0.32 sent for a tiny Gemma 3: two groups of windows, then full attention."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from cache.hashing import hash_chain
from tests.worker.adapter.fake_blocks import ROOT
from worker.adapter.blocks import EngineBlocks
from worker.adapter.kv_events import BlockStored

RECORDING = Path(__file__).with_name("hybrid_events.txt")
BLOCK_SIZE = 32
FULL = 2
"""The group of full attention."""
_PROMPT = re.compile(r"-- (.*): (\d+) tokens, reused (\d+)")
_EVENT = re.compile(
    r"group (\d) (\w+) window (\w+) block (\d+) tokens (\d+) hashes \[([\d, ]*)\] parent (\w+) medium (\w+)"
)


@dataclass
class Step:
    prompt: list[int]
    num_reused: int
    events: list[BlockStored] = field(default_factory=list)


def prompt_of(what: str, num_tokens: int) -> list[int]:
    """All but the other prompts begin like the first."""
    first = 1000 * int(what.removeprefix("other ")) if what.startswith("other ") else 0
    return list(range(first, first + num_tokens))


def steps() -> Iterator[Step]:
    """The recorded prompts, each with its events. The recording has no tokens: these are made up."""
    ends: dict[int, int] = {}
    step: Step | None = None
    for line in RECORDING.read_text().splitlines():
        if (prompt := _PROMPT.match(line)) is not None:
            if step is not None:
                yield step
            step = Step(prompt_of(prompt[1], int(prompt[2])), int(prompt[3]))
        elif (event := _EVENT.search(line)) is not None:
            assert step is not None
            group, size, num_tokens = int(event[1]), int(event[4]), int(event[5])
            keys = tuple(int(key) for key in re.findall(r"\d+", event[6]))
            parent = None if event[7] == "None" else int(event[7])
            begin = 0 if parent is None else ends[parent]
            if group == FULL:
                ends |= {key: begin + size * at for at, key in enumerate(keys, 1)}
            step.events.append(
                BlockStored(
                    keys,
                    parent,
                    tuple(step.prompt[begin : begin + num_tokens]),
                    size,
                    medium=event[8],
                    extra_keys=tuple((ROOT.hex(),) if parent is None and not at else None for at in range(len(keys))),
                    group_idx=group,
                    kv_cache_spec_kind=event[2],
                    kv_cache_spec_sliding_window=None if event[3] == "None" else int(event[3]),
                )
            )
    assert step is not None
    yield step


def promises(*, dense_only: bool) -> list[tuple[int, int]]:
    """Return what the index promises for each prompt, and what the engine reused."""
    blocks = EngineBlocks(BLOCK_SIZE, max_names=1000)
    found = []
    for step in steps():
        chain = hash_chain(ROOT, step.prompt, BLOCK_SIZE)
        found.append((blocks.num_matched_tokens(chain, len(step.prompt)), step.num_reused))
        batches: list[list[BlockStored]] = []
        for recorded in step.events:
            event = recorded
            if dense_only and event.group_idx != FULL:
                continue
            if dense_only:  # what such a reader makes of it: an engine with one group
                event = replace(event, group_idx=0)
            if not batches or event.group_idx in {seen.group_idx for seen in batches[-1]}:
                batches.append([])
            batches[-1].append(event)
        for batch in batches:
            blocks.apply(batch)
    return found


def test_the_recording_replays_exactly() -> None:
    found = promises(dense_only=False)
    assert len(found) == 9
    assert [promised for promised, _ in found] == [reused for _, reused in found]


def test_the_full_attention_alone_promises_too_much() -> None:
    """A reader that filters the events by kind of group does so."""
    wrong = [(promised, reused) for promised, reused in promises(dense_only=True) if promised != reused]
    assert len(wrong) == 2
    assert all(promised > reused for promised, reused in wrong)
