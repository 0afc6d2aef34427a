"""The states of an engine: by a machine with a clock of its own, and over the fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.fake_engine.server import FakeEngine
from tests.waiting import until
from tests.worker.adapter.rig import FACTS, Rig, fake_engine, is_lost, make_request, running, token_ids
from worker.adapter.api import EngineLoad, EventSource
from worker.adapter.health import IS_LOST, MAX_FAILED, TABLE, EngineHealth, Sign, State, facts_of
from worker.adapter.vllm import VllmApi
from worker.wire import End

HANG_AFTER_S = 20.0
PROBE_AFTER_S = 5.0
COUNTS = EngineLoad(FACTS.started_s, 0, 0, FACTS.num_blocks, FACTS.block_size, 0.0)


def test_the_table_is_whole() -> None:
    assert set(TABLE) == set(State)
    assert not TABLE[State.REPLACED], "nothing brings it back"
    assert {sign for sign, state in TABLE[State.HUNG].items() if state is State.SURE} == {Sign.TOKEN}
    for state, moves in TABLE.items():
        assert state is State.REPLACED or moves[Sign.OTHER] is State.REPLACED
        assert state not in (State.STARTING, State.PAUSED, State.GONE) or Sign.STALL not in moves


def test_an_engine_that_does_not_say_when_it_started() -> None:
    """With several API servers. If nothing has listened at its port, another process answers."""
    counts = replace(COUNTS, started_s=0.0)
    facts = facts_of(counts, FACTS.model)
    health = EngineHealth(facts, hang_s=HANG_AFTER_S, probe_s=PROBE_AFTER_S)
    health.apply(Sign.TOKEN)
    for is_closed, expected in ((False, State.SURE), (True, State.REPLACED)):
        for _ in range(MAX_FAILED):
            health.failed("no answer", is_closed=is_closed, num_open=0)
        health.answered(facts, counts, is_paused=False, num_open=0)
        assert health.state is expected


class LifeMachine(RuleBasedStateMachine):
    """A second each tick. `silent_s` is how long the engine has had requests and shown nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.health = EngineHealth(FACTS, hang_s=HANG_AFTER_S, probe_s=PROBE_AFTER_S, clock=lambda: self.now_s)
        self.counts = COUNTS
        self.num_open = 0
        self.silent_s = 0.0
        self.before = self.health.state
        self.had_token = False
        self.is_probed = False

    def take(self, *, moved: bool = False) -> None:
        """Note what happened: how long it is silent by the book of the test."""
        if moved or self.health.state is not self.before:
            self.silent_s = 0.0

    @rule()
    def token(self) -> None:
        self.before = self.health.state
        self.health.apply(Sign.TOKEN)
        self.had_token, self.is_probed = True, False
        self.take(moved=True)
        assert self.health.state is TABLE[self.before].get(Sign.TOKEN, self.before)

    @rule()
    def event(self) -> None:
        self.before = self.health.state
        self.health.progress()
        self.take(moved=True)
        assert self.health.state is self.before, "only a token brings an engine back"

    @rule(num_open=st.integers(0, 2))
    def requests(self, num_open: int) -> None:
        self.num_open = num_open

    @rule(moves=st.booleans(), is_paused=st.booleans(), others=st.integers(0, 1))
    def answer(self, moves: bool, is_paused: bool, others: int) -> None:
        self.before = self.health.state
        first = self.health._counts is None
        counts = replace(self.counts, num_running=others, work=self.counts.work + moves)
        moved = first or counts != self.counts
        self.counts = counts
        busy = self.num_open + self.is_probed + others
        self.tick()
        self.silent_s = self.silent_s + 1.0 if busy and not moved else 0.0
        self.health.answered(
            facts_of(counts, FACTS.model), counts, is_paused=is_paused, num_open=self.num_open + self.is_probed
        )
        if self.before is State.SURE and not is_paused:
            assert (self.health.state is State.HUNG) <= (self.silent_s >= HANG_AFTER_S - PROBE_AFTER_S - 1.0)
            assert (self.silent_s > HANG_AFTER_S + 1.0) <= (self.health.state is State.HUNG)
        if is_paused and self.before not in IS_LOST:
            assert self.health.state is State.PAUSED
        self.take(moved=moved)
        self.ask()

    @rule()
    def failure(self) -> None:
        self.before = self.health.state
        self.tick()
        self.silent_s += 1.0
        self.health.failed("no answer", is_closed=False, num_open=self.num_open + self.is_probed)
        self.take()
        assert self.health.is_slow

    def tick(self) -> None:
        self.now_s += 1.0

    def ask(self) -> None:
        if not self.is_probed and self.health.asks_for_token():
            self.is_probed = True
        if self.health.state in (State.STARTING, State.HUNG, State.DOUBTFUL):
            assert self.is_probed, "only a token can bring it back"
        if self.health.state is State.PAUSED:
            self.is_probed = False

    @invariant()
    def only_a_token_makes_it_sure(self) -> None:
        assert (self.health.state is State.SURE) <= self.had_token
        assert (self.health.problem is None) == (self.health.state is State.SURE)


TestLifeMachine = LifeMachine.TestCase
TestLifeMachine.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


def test_a_silent_engine_is_asked_and_then_hangs() -> None:
    """In time without requests, too, and with no way back but a token."""
    for num_open in (0, 1):
        now_s = [0.0]
        health = EngineHealth(FACTS, hang_s=HANG_AFTER_S, probe_s=PROBE_AFTER_S, clock=lambda now_s=now_s: now_s[0])
        health.apply(Sign.TOKEN)
        probed = 0
        while health.state is State.SURE:
            now_s[0] += 1.0
            probed += not probed and health.asks_for_token()
            health.answered(FACTS, COUNTS, is_paused=False, num_open=num_open + probed)
        assert now_s[0] <= HANG_AFTER_S + PROBE_AFTER_S
        for _ in range(100):
            now_s[0] += 1.0
            health.asks_for_token()
            health.answered(FACTS, replace(COUNTS, work=now_s[0]), is_paused=False, num_open=num_open)
            assert health.state is State.HUNG
        assert health.apply(Sign.TOKEN)
        assert health.problem is None


def test_failed_calls() -> None:
    health = EngineHealth(FACTS, hang_s=HANG_AFTER_S, probe_s=PROBE_AFTER_S)
    health.apply(Sign.TOKEN)
    changes = [health.failed("timeout", is_closed=False, num_open=1) for _ in range(MAX_FAILED)]
    assert changes == [False] * (MAX_FAILED - 1) + [True]
    assert health.answered(FACTS, COUNTS, is_paused=False, num_open=1)
    assert health.problem is None


@pytest.fixture
async def fake(engine_folder: Path) -> AsyncIterator[tuple[FakeEngine, str]]:
    async with fake_engine(engine_folder, "--token-s", "0.005", "--chunk-s", "0.1") as started:
        yield started


def rig_over(fake: FakeEngine, url: str, *, hang_s: float, probe_s: float) -> Rig:
    [rank], [events] = fake.ranks, [fake.ranks[0].events]
    assert events is not None
    facts = FACTS._replace(started_s=fake.started_s, num_blocks=rank.pool.num_blocks, block_size=rank.pool.block_size)
    facts = facts._replace(model=replace(FACTS.model, source=str(fake.args.folder)))
    return Rig(
        VllmApi(url), EventSource(events.endpoint, events.replay, events.topic), facts, hang_s=hang_s, probe_s=probe_s
    )


@pytest.mark.parametrize("num_streams", [0, 2])
async def test_a_core_that_hangs_behind_a_server_that_answers(
    fake: tuple[FakeEngine, str], brisk: None, num_streams: int
) -> None:
    engine, url = fake
    async with running(rig_over(engine, url, hang_s=0.4, probe_s=0.1)) as rig:
        keys = [rig.submit(make_request(max_tokens=3000, ignore_eos=True)) for _ in range(num_streams)]
        await until(lambda: all(token_ids(rig.frames[key]) for key in keys))
        engine.ranks[0].stop(True)
        await until(lambda: rig.load.draining)
        assert rig.state == "hung"
        assert "no progress" in (await rig.engine.liveness() or "")
        assert "no progress" in rig.load.problem
        await until(lambda: all(map(rig.is_over, keys)))
        assert all(is_lost(rig.frames[key]) for key in keys)
        for _ in range(20):
            await asyncio.sleep(0.02)
            assert rig.state == "hung", "it never comes back by an answer"
        engine.ranks[0].stop(False)
        await until(lambda: not rig.load.draining)
        assert rig.state == "sure"
        assert isinstance((await rig.answer(make_request()))[-1], End)


async def test_a_long_prefill_in_chunks_is_no_hang(fake: tuple[FakeEngine, str], brisk: None) -> None:
    engine, url = fake
    async with running(rig_over(engine, url, hang_s=0.6, probe_s=0.1)) as rig:
        engine.args.prefill_tokens_per_s = 50.0
        frames = await rig.answer(make_request(range(100, 200), max_tokens=2))
        assert isinstance(frames[-1], End), "after two seconds, in steps of a tenth"
        assert rig.state == "sure"
