"""Blocks of live requests, and of ended ones until the index has them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from cache.records import WorkerMember
from cache.types import BlockHash, Epoch, WorkerId
from server.router.live_blocks import LiveBlocks, OwnBlocks
from server.router.load_tracker import TrackedRequest, WorkerLoadEstimate
from tests.members import make_member

DELAY_S = 0.5


def random_chain(length: int) -> list[BlockHash]:
    return [BlockHash(os.urandom(16)) for _ in range(length)]


def shared_prefix(one: Sequence[BlockHash], other: Sequence[BlockHash]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


class Worker:
    """One worker, its estimate, and the requests at it."""

    def __init__(self, live: Live, name: str) -> None:
        self._live = live
        self.member: WorkerMember = make_member(name)
        self.incarnation = WorkerId(name), Epoch(self.member.epoch)
        self.estimate = WorkerLoadEstimate(self.member.epoch, 60.0)

    def open(self, hashes: Sequence[BlockHash], prefill_s: float = 1.0) -> tuple[TrackedRequest, Sequence[BlockHash]]:
        request = self.estimate.add(prefill_s, len(hashes), self._live.now_s)
        self._live.blocks.opened(self.incarnation, request, hashes)
        return request, hashes

    def answer(self, request: TrackedRequest) -> None:
        self.estimate.first_token(request, self._live.now_s)

    def close(self, request: TrackedRequest, hashes: Sequence[BlockHash]) -> int:
        num_gone = self._live.blocks.closed(self.incarnation, request, hashes)
        self.estimate.close(request, self._live.now_s)
        return num_gone

    def own(self, hashes: Sequence[BlockHash]) -> OwnBlocks:
        return self._live.blocks.own_blocks(self.member, self._live.blocks.path(hashes), self.estimate)


class Live:
    """Blocks of live requests, with a clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.blocks = LiveBlocks(lambda: self.now_s, DELAY_S)
        self.workers = [Worker(self, name) for name in ("a", "b")]

    def assert_empty(self) -> None:
        self.now_s += 10.0
        self.blocks.path([])
        assert not self.blocks._roots, "nothing is left of a worker that may never come back"
        assert not self.blocks._ended


def test_blocks_live_as_long_as_a_request_with_them() -> None:
    live, hashes = Live(), random_chain(8)
    at = live.workers[0]
    first, second = at.open(hashes[:6]), at.open(hashes[:4])
    assert at.own(hashes) == (6, 6, 2.0), "both prefills"
    assert live.workers[1].own(hashes) == (0, 0, 0.0)
    assert at.close(*first) == 2
    assert at.own(hashes)[:2] == (4, 4)
    assert at.close(*second) == 4
    live.assert_empty()


def test_the_next_request_computes_the_blocks_of_one_that_failed() -> None:
    live, hashes = Live(), random_chain(8)
    at = live.workers[0]
    first, second, third = at.open(hashes, 1.0), at.open(hashes[:4], 0.25), at.open(hashes[:6], 4.0)
    assert [at.own(hashes[:num]).ready_s for num in (4, 6, 8)] == [2.0, 2.0, 2.0]
    at.close(*first)
    assert [at.own(hashes[:num]).ready_s for num in (4, 6)] == [0.5, 4.25]
    at.answer(second[0])
    at.close(*second)
    assert at.own(hashes[:4]).ready_s == 0.0, "it has computed them"
    assert at.own(hashes[:6]).ready_s == 4.0
    at.close(*third)
    live.assert_empty()


def test_a_short_request_counts_until_the_index_has_it() -> None:
    live, hashes = Live(), random_chain(8)
    at = live.workers[0]
    answered, failed = at.open(hashes[:5]), at.open(hashes)
    live.now_s = 1.0
    at.answer(answered[0])
    live.now_s = 1.2
    at.close(*answered)
    at.close(*failed)
    assert at.own(hashes) == (0, 5, 0.0)
    live.now_s = 1.5
    assert at.own(hashes) == (0, 0, 0.0)


def test_holders_are_the_longest_then_the_latest() -> None:
    live, hashes = Live(), random_chain(8)
    a, b = live.workers
    a.open(hashes[:4])
    b.open(hashes[:4])
    path = live.blocks.path(hashes)
    assert live.blocks.holders(path, 2) == [b.incarnation, a.incarnation]
    a.open(hashes[:6])
    path = live.blocks.path(hashes)
    assert live.blocks.holders(path, 2) == [a.incarnation, b.incarnation]
    assert live.blocks.holders(path, 1) == [a.incarnation]


ACTIONS = st.tuples(
    st.integers(0, 2),  # the prompt
    st.integers(0, 12),  # its blocks
    st.integers(0, 1),  # the worker
    st.sampled_from(["none", "answered", "failed", "answered late"]),  # how the oldest open request ends
    st.sampled_from([0.0, 0.2, 0.4]),  # the time that passes
)


@given(st.lists(ACTIONS, max_size=30))
def test_own_blocks_are_those_of_a_list_of_requests(actions: list[tuple[int, int, int, str, float]]) -> None:
    live, shared = Live(), random_chain(4)
    prompts = [shared + random_chain(8) for _ in range(3)]
    opened: list[tuple[Worker, TrackedRequest, Sequence[BlockHash]]] = []
    ended: list[tuple[float, Worker, Sequence[BlockHash]]] = []

    def end(how: str) -> None:
        at, request, hashes = opened.pop(0)
        if how != "failed":
            at.answer(request)
            first_token_s, live.now_s = live.now_s, live.now_s + (0.6 if how == "answered late" else 0.0)
            ended.append((first_token_s + DELAY_S, at, hashes))
        kept = max((shared_prefix(hashes, other) for where, _, other in opened if where is at), default=0)
        assert at.close(request, hashes) == len(hashes) - kept

    for number, length, where, how, passed_s in actions:
        at, hashes = live.workers[where], prompts[number][:length]
        opened.append((at, at.open(hashes)[0], hashes))
        live.now_s += passed_s
        if how != "none":
            end(how)
        for worker in live.workers:
            for prompt in prompts:
                num_live = max((shared_prefix(prompt, each) for there, _, each in opened if there is worker), default=0)
                unpublished = [each for until_s, there, each in ended if there is worker and until_s > live.now_s]
                num_cached = max((shared_prefix(prompt, each) for each in unpublished), default=0)
                assert worker.own(prompt)[:2] == (num_live, max(num_live, num_cached))
    while opened:
        end("failed")
    live.assert_empty()
