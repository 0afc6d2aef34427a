from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from cache.types import BlockHash, Epoch, WorkerId
from server.router.pending_prefixes import Overlay
from server.router.recent import RecentPlacements

W, E = WorkerId("w"), Epoch("e")


def chain(length: int) -> list[BlockHash]:
    return [BlockHash(os.urandom(16)) for _ in range(length)]


def overlay() -> Overlay:
    return Overlay(publish_delay_s=0.5, ttl_s=100.0)


def test_entries_live_until_the_index_can_know_them() -> None:
    entries, hashes = overlay(), chain(8)
    speculation = entries.add(W, E, hashes[:5], 0.0)
    assert entries.matched(W, E, hashes) == 5
    entries.confirm(speculation, 10.0)
    entries.expire(10.4)
    assert entries.matched(W, E, hashes) == 5
    entries.expire(10.5)
    assert entries.matched(W, E, hashes) == 0
    assert entries.num_entries == 0
    assert not entries._blocks, "nothing is left of a worker that may never come back"


def test_a_failure_ends_them_at_once_and_the_ttl_catches_leaks() -> None:
    entries, hashes = overlay(), chain(5)
    failed = entries.add(W, E, hashes, 0.0)
    entries.add(W, E, hashes[:2], 0.0)
    entries.remove(failed)
    entries.remove(failed)
    assert entries.matched(W, E, hashes) == 2, "another request's entries stay"
    entries.expire(99.0)
    assert entries.matched(W, E, hashes) == 2
    entries.expire(100.0)
    assert entries.num_entries == 0


def test_another_epoch_or_worker_has_none() -> None:
    entries, hashes = overlay(), chain(5)
    entries.add(W, E, hashes, 0.0)
    assert entries.matched(W, Epoch("other"), hashes) == 0
    assert entries.matched(WorkerId("other"), E, hashes) == 0
    assert entries.matched(W, E, []) == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12)), min_size=1, max_size=12), st.data())
def test_the_match_is_the_longest_prefix_of_what_is_present(adds: list[tuple[int, int]], data: st.DataObject) -> None:
    shared = chain(4)
    chains = [shared + chain(8) for _ in range(3)]
    entries = overlay()
    live = [(number, length, entries.add(W, E, chains[number][:length], 0.0)) for number, length in adds]
    for item in data.draw(st.lists(st.sampled_from(live), unique=True)):
        entries.remove(item[2])
    present = {h for number, length, speculation in live if speculation.present for h in chains[number][:length]}
    for hashes in chains:
        expected = next((i for i, h in enumerate(hashes) if h not in present), len(hashes))
        assert entries.matched(W, E, hashes) == expected
    assert entries.num_entries == len(present)


def test_recent_placements_are_bounded_and_forget_the_oldest() -> None:
    recent = RecentPlacements(max_blocks=100)
    chains = [chain(10) for _ in range(30)]
    for number, hashes in enumerate(chains):
        recent.add(WorkerId(f"w{number}"), E, hashes)
        assert recent.matched(hashes) == {(WorkerId(f"w{number}"), E): 10}
        assert len(recent) <= 100
    assert recent.matched(chains[0]) == {}


def test_the_last_placement_counts_also_when_the_one_before_is_remembered() -> None:
    recent, hashes = RecentPlacements(max_blocks=100), chain(10)
    recent.add(WorkerId("a"), E, hashes)
    recent.add(WorkerId("c"), E, chain(45))
    recent.add(WorkerId("b"), E, hashes[:5])
    assert recent.matched(hashes) == {(WorkerId("b"), E): 5, (WorkerId("a"), E): 10}


def test_recent_placements_keep_who_got_how_much() -> None:
    recent, hashes = RecentPlacements(1000), chain(10)
    recent.add(WorkerId("a"), E, hashes)
    recent.add(WorkerId("b"), E, hashes[:4])
    assert recent.matched([*hashes, *chain(3)]) == {(WorkerId("a"), E): 10, (WorkerId("b"), E): 4}
