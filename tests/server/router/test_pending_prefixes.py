from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cache.types import Epoch, WorkerId, WorkerIncarnation
from server.router.pending_prefixes import PendingPrefixes, RecentPlacements
from tests.server.router.fleets import chain

W = (WorkerId("w"), Epoch("e"))


def incarnation(name: str) -> WorkerIncarnation:
    return WorkerId(name), Epoch("e")


def pending() -> PendingPrefixes:
    return PendingPrefixes(publish_delay_s=0.5, ttl_s=100.0)


def test_entries_stay_until_the_index_can_know_them() -> None:
    entries, hashes = pending(), chain(8)
    prefix = entries.add(W, hashes[:5], 0.0)
    assert entries.match(W, hashes) == 5
    entries.confirm(prefix, 10.0)
    entries.expire(10.4)
    assert entries.match(W, hashes) == 5
    entries.expire(10.5)
    assert entries.match(W, hashes) == 0
    assert not entries._num_references, "nothing is left of a worker that may never come back"


def test_a_failure_ends_them_at_once_and_the_ttl_catches_leaks() -> None:
    entries, hashes = pending(), chain(5)
    failed = entries.add(W, hashes, 0.0)
    entries.add(W, hashes[:2], 0.0)
    entries.cancel(failed)
    entries.cancel(failed)
    assert entries.match(W, hashes) == 2, "another request's entries stay"
    entries.expire(99.0)
    assert entries.match(W, hashes) == 2
    entries.expire(100.0)
    assert not entries._num_references


def test_another_epoch_or_worker_has_none() -> None:
    entries, hashes = pending(), chain(5)
    entries.add(W, hashes, 0.0)
    assert entries.match((WorkerId("w"), Epoch("other")), hashes) == 0
    assert entries.match((WorkerId("other"), Epoch("e")), hashes) == 0
    assert entries.match(W, []) == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12)), min_size=1, max_size=12), st.data())
def test_the_match_is_the_longest_prefix_of_what_is_present(adds: list[tuple[int, int]], data: st.DataObject) -> None:
    shared = chain(4)
    chains = [shared + chain(8) for _ in range(3)]
    entries = pending()
    live = [(number, length, entries.add(W, chains[number][:length], 0.0)) for number, length in adds]
    for item in data.draw(st.lists(st.sampled_from(live), unique=True)):
        entries.cancel(item[2])
    present = {h for number, length, prefix in live if prefix in entries._open for h in chains[number][:length]}
    for hashes in chains:
        expected = next((i for i, h in enumerate(hashes) if h not in present), len(hashes))
        assert entries.match(W, hashes) == expected
    assert sum(map(len, entries._num_references.values())) == len(present)


def test_recent_placements_are_bounded_and_forget_the_oldest() -> None:
    recent = RecentPlacements(max_blocks=100)
    chains = [chain(10) for _ in range(30)]
    for number, hashes in enumerate(chains):
        recent.add(incarnation(f"w{number}"), hashes)
        assert recent.match(hashes) == {incarnation(f"w{number}"): 10}
        assert len(recent._young) + len(recent._old) <= 100
    assert recent.match(chains[0]) == {}


def test_the_last_placement_of_a_block_counts() -> None:
    recent, hashes = RecentPlacements(max_blocks=100), chain(10)
    recent.add(incarnation("a"), hashes)
    recent.add(incarnation("c"), chain(45))
    recent.add(incarnation("b"), hashes[:5])
    assert recent.match(hashes) == {incarnation("b"): 5, incarnation("a"): 10}


def test_recent_placements_know_how_much_each_worker_got() -> None:
    recent, hashes = RecentPlacements(1000), chain(10)
    recent.add(incarnation("a"), hashes)
    recent.add(incarnation("b"), hashes[:4])
    assert recent.match([*hashes, *chain(3)]) == {incarnation("a"): 10, incarnation("b"): 4}
