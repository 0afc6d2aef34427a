"""Recent chains."""

from __future__ import annotations

import os
from collections.abc import Sequence

from cache.types import BlockHash
from server.router.ledger import Ledger
from server.router.types import RouteRequest
from tests.members import make_member

SIZE = 16


def random_chain(length: int) -> list[BlockHash]:
    return [BlockHash(os.urandom(16)) for _ in range(length)]


class Recent:
    """A ledger that records where prompts were computed."""

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        self.ledger = Ledger(lambda: 0.0, max_bytes)

    def add(self, worker: str, hashes: Sequence[BlockHash]) -> None:
        self.ledger.computed(RouteRequest("r", "m", len(hashes) * SIZE, hashes), make_member(worker, block_size=SIZE))

    def match(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        return {worker_id: length for (worker_id, _), length in self.ledger.recent(hashes).items()}


def test_recent_chains_are_bounded_and_forget_the_oldest() -> None:
    recent = Recent(max_bytes=20_000)
    chains = [random_chain(10) for _ in range(30)]
    for number, hashes in enumerate(chains):
        recent.add(f"w{number}", hashes)
        assert recent.match(hashes) == {f"w{number}": 10}
        assert recent.ledger.num_bytes <= 20_000
    assert recent.match(chains[0]) == {}
    assert len(recent.ledger._recent) == 10 * len(recent.ledger.chains)


def test_recent_chains_tell_how_much_each_worker_got_last() -> None:
    recent, hashes = Recent(), random_chain(10)
    recent.add("a", hashes)
    recent.add("b", hashes[:4])
    assert recent.match([*hashes, *random_chain(3)]) == {"a": 10, "b": 4}
