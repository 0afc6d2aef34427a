"""The tree of shared prefixes."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cache.hashing import hash_chain, index_entry
from cache.records import WorkerMember
from cache.types import BlockHash
from server.ops.prefix_tree import MAX_HOLDERS, SharedPrefix, top, tree_rows
from server.router.ledger import Ledger
from server.router.types import RouteRequest
from tests.members import make_member

SIZE = 16
ROOT = BlockHash(b"r" * 16)


def chain(*blocks: int) -> list[BlockHash]:
    return hash_chain(ROOT, [block for block in blocks for _ in range(SIZE)], SIZE)


class Requests:
    """Feeds a tree with matches at a clock of its own."""

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        self.now_s = 0.0
        self.tree = Ledger(lambda: self.now_s, max_bytes)
        self.workers: dict[str, WorkerMember] = {}

    def match(self, worker: str, *blocks: int, model: str = "m", num_more: int = 1) -> str:
        """Add a request that finds `blocks` at `worker`. Return the name of the prefix."""
        self.workers.setdefault(worker, make_member(worker, model=model, block_size=SIZE))
        hashes = chain(*blocks, *range(900, 900 + num_more))
        request = RouteRequest("r", model, len(hashes) * SIZE, hashes)
        self.tree.found(request, self.workers[worker], len(blocks) * SIZE)
        return index_entry(chain(*blocks)[-1]).hex() if blocks else ""

    def top(self, limit: int = 100) -> list[SharedPrefix]:
        return top(self.tree, self.workers.values(), limit)


def test_a_prefix_counts_the_matches_that_end_there_or_below() -> None:
    requests = Requests()
    system = requests.match("a", 1, 2)
    requests.now_s = 5.0
    chat = requests.match("b", 1, 2, 3, 4)
    requests.match("b", 1, 2, 3, 4)
    requests.match("b", 1, 2, 3, 4)
    other = requests.match("a", 1, 2, 5)
    requests.match("a")  # found nothing
    requests.now_s = 6.0
    first, second, third = requests.top()
    assert (first["hash"], first["num_hits"], first["num_blocks"], first["num_tokens"]) == (chat, 3, 4, 4 * SIZE)
    assert (second["hash"], second["num_hits"], second["workers"]) == (system, 5, ["b", "a"])
    assert (third["hash"], third["path"], third["workers"]) == (other, [system, other], ["a"])
    assert [prefix["idle_s"] for prefix in (first, second, third)] == [1.0, 1.0, 1.0]
    assert [prefix["hash"] for prefix in requests.top(1)] == [chat]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 1), max_size=4)), max_size=25))
def test_hits_are_the_matches_of_requests(matches: list[tuple[str, list[int]]]) -> None:
    requests = Requests()
    expected: Counter[str] = Counter()
    ends = {requests.match(worker, *blocks) for worker, blocks in matches} - {""}
    for _, blocks in matches:
        expected.update(index_entry(block_hash).hex() for block_hash in chain(*blocks))
    found = {prefix["hash"]: prefix for prefix in requests.top()}
    assert found.keys() == ends
    for name, prefix in found.items():
        assert prefix["num_hits"] == expected[name]
        assert prefix["path"][-1] == name
        assert set(prefix["path"]) <= ends


def test_a_worker_that_restarted_or_left_holds_nothing() -> None:
    requests = Requests()
    requests.match("a", 1)
    chat = requests.match("b", 1, 2)
    requests.workers["a"] = make_member("a", "another", block_size=SIZE)
    (prefix,) = requests.top()
    assert (prefix["path"], prefix["workers"]) == ([chat], ["b"])
    del requests.workers["b"]
    assert requests.top() == []


def test_the_least_recently_found_prefix_is_forgotten_first() -> None:
    requests = Requests(max_bytes=2000)
    old, kept = requests.match("a", 1, 2), requests.match("a", 3)
    assert {prefix["hash"] for prefix in requests.top()} == {old, kept}
    requests.match("a", 1, 2)
    new = requests.match("a", 4, 5)
    assert {prefix["hash"] for prefix in requests.top()} == {old, new}
    long = requests.match("a", *range(20))
    assert [prefix["hash"] for prefix in requests.top()] == [long], "longer than the bound, and the only one"


def test_the_rows_are_a_tree() -> None:
    requests = Requests()
    system = requests.match("a", 1, 2, 3)
    chat = requests.match("a", 1, 2, 3, 4)
    turn = requests.match("b", 1, 2, 3, 4, 5)
    other = requests.match("b", 1, 2, 3, 6)
    foreign = requests.match("c", 7, model="another")
    rows = tree_rows(requests.top())
    assert [(row["hash"], row["parent"], row["level"]) for row in rows] == [
        (system, None, 1),
        (chat, system, 2),
        (turn, chat, 3),
        (other, system, 2),
        (foreign, None, 1),
    ]
    assert (rows[0]["workers"], rows[0]["num_workers"], rows[0]["num_hits"]) == (["a", "b"], 2, 4)
    without_chat = tree_rows([prefix for prefix in requests.top() if prefix["hash"] != chat])
    assert next(row["parent"] for row in without_chat if row["hash"] == turn) == system, "the nearest row above"


def test_a_row_names_some_holders_and_counts_all() -> None:
    requests = Requests()
    for number in range(MAX_HOLDERS + 3):
        requests.match(f"w{number}", 1)
    (row,) = tree_rows(requests.top())
    assert (len(row["workers"]), row["num_workers"]) == (MAX_HOLDERS, MAX_HOLDERS + 3)
