"""Where conversations part, from the block hashes of their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cache.hashing import hash_chain
from cache.types import BlockHash
from server.router.partings import MAX_CLIENTS, MAX_PARTING_ROWS, MAX_PLACES, Partings
from server.router.types import RouteRequest

SIZE = 4


class Traffic:
    """Feeds prompts, each a list of blocks by number; no two blocks of one number are alike in two tenants."""

    def __init__(self, max_blocks: int = 1000) -> None:
        self.partings = Partings(lambda: 0.0, max_blocks)
        self.asked: list[int] = []

    def send(self, *blocks: int, client: str = "agent", tenant: str = "") -> None:
        root = BlockHash(tenant.encode().ljust(16, b"r"))
        hashes = hash_chain(root, [block for block in blocks for _ in range(SIZE)], SIZE)
        request = RouteRequest("r", "m", len(blocks) * SIZE + 1, hashes, tenant=tenant)
        self.partings.add(request, client, SIZE, self.field_at)

    def field_at(self, token: int) -> str:
        self.asked.append(token)
        return "system" if token < 2 * SIZE else "messages"

    def rows(self, *names: str) -> list[tuple[Any, ...]]:
        names = names or ("field", "part_tokens", "prompt_tokens", "num_conversations")
        return [tuple(row[name] for name in names) for row in self.partings.top(1000)]


def test_new_conversations_part_where_their_prompts_do() -> None:
    traffic = Traffic()
    for user in range(10, 14):
        traffic.send(1, 2, 3, user, user)
    assert traffic.rows() == [("messages", 3 * SIZE, 5 * SIZE + 1, 3)]
    assert traffic.asked == [3 * SIZE]


def test_a_line_that_changes_shows_as_a_parting_at_the_beginning() -> None:
    traffic = Traffic()
    for line in range(10, 14):
        traffic.send(1, line, 2, 3, 4)
    assert traffic.rows() == [("system", SIZE, 5 * SIZE + 1, 3)]


def test_a_conversation_that_goes_on_parts_from_nothing() -> None:
    traffic = Traffic()
    traffic.send(1, 2, 3)
    traffic.send(1, 2, 3, 4, 5)
    traffic.send(1, 2, 3, 6)  # another answer
    traffic.send(1, 2, 3, 6)
    traffic.send(1, 2)
    assert traffic.rows() == []


def test_tenants_and_clients_have_rows_of_their_own() -> None:
    traffic = Traffic()
    for tenant in ("a", "b"):
        for client in ("one", "two"):
            traffic.send(1, ord(client[0]), 9, client=client, tenant=tenant)
            traffic.send(1, ord(client[1]), 9, client=client, tenant=tenant)
    assert sorted(traffic.rows("tenant", "client", "num_conversations")) == [
        ("a", "one", 1), ("a", "two", 2), ("b", "one", 1), ("b", "two", 2)]  # fmt: skip
    assert {row["tenant"] for row in traffic.partings.top(10, "a")} == {"a"}
    assert traffic.partings.top(10, "c") == []


def test_memory_is_bounded() -> None:
    traffic = Traffic(max_blocks=64)
    for number in range(2 * MAX_CLIENTS):
        traffic.send(*range(number, number + 3), client=f"client-{number}")
    for number in range(4 * MAX_PLACES):
        traffic.send(*range(5, 5 + number), 1000 + number, 1)
    parts = traffic.partings
    assert len(parts._clients) <= MAX_CLIENTS
    assert all(len(places) <= MAX_PLACES for places in parts._clients.values())
    assert all(len(each.blocks) <= 64 for each in (parts._young, parts._old))
    assert all(len(each.ends) <= 64 for each in (parts._young, parts._old))
    assert len(parts.top()) <= MAX_PARTING_ROWS


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=25))
def test_a_parting_is_the_longest_known_beginning(prompts: Sequence[Sequence[int]]) -> None:
    traffic = Traffic()
    seen: list[Sequence[int]] = []
    counted = 0
    for blocks in prompts:
        known = max((_shared(blocks, earlier) for earlier in seen), default=0)
        ends = set(map(tuple, seen))
        goes_on = known == len(blocks) or (known > 0 and tuple(blocks[:known]) in ends)
        traffic.asked.clear()
        traffic.send(*blocks)
        counted += bool(seen) and not goes_on
        assert set(traffic.asked) <= {known * SIZE}
        assert sum(row["num_conversations"] for row in traffic.partings.top(1000)) == counted
        seen.append(blocks)


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
