"""Lookups of the tokens that may follow a sequence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.scheduler.drafter import Drafter

MAX_MATCH = 16
texts = st.lists(st.integers(0, 3), max_size=60)


def source_of(token_ids: list[int]) -> int:
    """Return where the latest of the longest matches ends, by trying them all; 0: nowhere."""
    for length in range(min(MAX_MATCH, len(token_ids) - 1), 1, -1):
        for source in range(len(token_ids) - 1, length - 1, -1):
            if token_ids[source - length : source] == token_ids[-length:]:
                return source
    return 0


@given(texts)
def test_a_draft_follows_the_latest_of_the_longest_matches(token_ids: list[int]) -> None:
    """The draft is the tokens that followed the latest of the longest matches."""
    drafter = Drafter(token_ids)
    source = source_of(token_ids)
    assert drafter.has_source == (source > 0)
    if source:
        want = list(token_ids)
        while len(want) < len(token_ids) + 7:  # beyond the end it repeats what it drafts
            want.append(want[source + len(want) - len(token_ids)])
        assert drafter.draft(7) == want[len(token_ids) :]


@given(texts, texts)
def test_each_token_judges_the_lookup(begin: list[int], token_ids: list[int]) -> None:
    drafter, known = Drafter(begin), list(begin)
    for token_id in token_ids:
        guess = drafter.draft(1)[0] if drafter.has_source else None
        before = drafter.hit_rate(0)
        hits = [drafter.hit_rate(count) for count in range(MAX_MATCH)]
        drafter.extend([token_id])
        known.append(token_id)
        assert len(drafter) == len(known)
        if guess is None:
            assert drafter.has_source == (source_of(known) > 0)
        elif guess == token_id:
            assert drafter.has_source
            assert max(hits) <= 1.0
        else:
            assert drafter.has_source == (source_of(known) > 0)
            assert before > 0.0


def test_hit_rates_follow_right_and_wrong_sources() -> None:
    """A source that is right gets a higher hit rate, and one that is wrong a lower one."""
    period = [1, 2, 3, 4, 5, 6, 7]
    right = Drafter(period * 2)
    right.extend(period * 6)
    assert right.hit_rate(0) > 0.9
    wrong = Drafter([])
    for number in range(60):
        for token_id in (1, 2, 100 + number):
            wrong.extend([token_id])
    assert wrong.has_source is False
    wrong.extend([1, 2])
    assert wrong.has_source
    assert wrong.hit_rate(0) < 0.01


def test_a_lookup_compares_the_latest_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.scheduler.drafter._MAX_LOOKED_UP", 6)
    assert not Drafter([1, 2, 3, 4, 5, 6, 7, 8, 1, 2]).has_source
    near = Drafter([9, 9, 1, 2, 3, 4, 1, 2])
    assert near.draft(2) == [3, 4]
