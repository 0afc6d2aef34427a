"""Routing hints from request headers: sessions of agents, hard affinity and a TTFT budget."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from server.errors import InvalidRequestError
from server.request.hints import SESSION_HEADERS, read_hints


@pytest.mark.parametrize("name", SESSION_HEADERS)
def test_every_agents_header_names_the_session(name: str) -> None:
    hints = read_hints([(b"host", b"h"), (name.encode(), b"s-1")])
    assert (hints.session, hints.hard_affinity, hints.ttft_budget_s) == ("s-1", False, None)


def test_the_page_has_the_headers_in_their_order() -> None:
    table = Path("docs/routing.md").read_text().partition("| who sends it | name |")[2].partition("\n\n")[0]
    assert [name for name in re.findall("`([^`]+)`", table) if name in SESSION_HEADERS] == list(SESSION_HEADERS)


def test_the_first_name_that_is_not_empty_counts() -> None:
    headers = [(name.encode(), b"" if at == 0 else b"%d" % at) for at, name in enumerate(SESSION_HEADERS)]
    assert read_hints(headers[::-1]).session == "1"
    assert read_hints(headers[:1]).session is None


@pytest.mark.parametrize("value", [b"", b"Hard", b"yes", b"hard, soft", b"\xff"])
def test_an_unknown_affinity_is_named(value: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="'soft' or 'hard'") as caught:
        read_hints([(b"x-headstart-affinity", value)])
    assert caught.value.param == "x-headstart-affinity"


def test_hard_affinity_is_asked_for() -> None:
    assert read_hints([(b"x-headstart-affinity", b"hard")]).hard_affinity
    assert not read_hints([(b"x-headstart-affinity", b"soft")]).hard_affinity
