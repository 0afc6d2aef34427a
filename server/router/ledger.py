"""Prompts of the past that this gateway tracks without the index. Nothing of it is written to Redis.

    recent    the worker that last computed each block: replaces the index while Redis does not answer
    hits      the prefixes that requests found cached: the tree that operators see

Both share one bound in bytes. The least recently used chain is forgotten first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from cache.hashing import index_entry
from cache.records import WorkerMember
from cache.types import BlockHash, WorkerId, WorkerIncarnation
from server.router.types import RouteRequest

MAX_BYTES: Final = 64 << 20  # half a million blocks
_BLOCK_BYTES: Final = 120
"""A hash, its entry in a table, and its place in a chain."""
_CHAIN_BYTES: Final = 600  # an estimate, like the next: only `MAX_BYTES` depends on it
_HIT_BYTES: Final = 100  # a worker and a count
_MAX_MATCHES: Final = 2048
"""The latest prefixes with hits of which the tree is made."""
MAX_ROWS: Final = 16  # bounds a frame of the dashboard's feed
MAX_HOLDERS: Final = 6
"""Workers named in a row; the rest are counted."""
SharedPrefix = dict[str, Any]
"""A prefix at which matches ended, as JSON. Hashes are 8 bytes in hex, as in Redis."""


@dataclass(slots=True, eq=False)
class _Chain:
    """The blocks up to one block, which names it."""

    model: str
    block_size: int
    hashes: Sequence[BlockHash]
    last_s: float = 0.0
    computed_at: WorkerIncarnation | None = None
    num_hits: dict[WorkerIncarnation, int] = field(default_factory=dict)
    """Requests whose match ended here."""

    @property
    def num_bytes(self) -> int:
        return _CHAIN_BYTES + _BLOCK_BYTES * len(self.hashes) + _HIT_BYTES * len(self.num_hits)


class Ledger:
    """Owned by one gateway's scorer."""

    def __init__(self, clock: Callable[[], float], max_bytes: int = MAX_BYTES) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._chains: dict[BlockHash, _Chain] = {}
        """By the last block, the least recently used first."""
        self._recent: dict[BlockHash, _Chain] = {}
        """The last chain computed with each block."""

    def computed(self, request: RouteRequest, member: WorkerMember) -> None:
        """Record that the worker holds the prompt's blocks."""
        if not request.hashes:
            return
        chain = self._use(request, member, len(request.hashes))
        chain.computed_at = member.worker_id, member.epoch
        self._recent.update(dict.fromkeys(chain.hashes, chain))
        self._forget()

    def found(self, request: RouteRequest, member: WorkerMember, num_cached_tokens: int) -> None:
        """Count one request and its cached tokens."""
        num_blocks = min(num_cached_tokens // member.block_size, len(request.hashes))
        if num_blocks <= 0:
            return
        chain, incarnation = self._use(request, member, num_blocks), (member.worker_id, member.epoch)
        if incarnation not in chain.num_hits:
            self.num_bytes += _HIT_BYTES
        chain.num_hits[incarnation] = chain.num_hits.get(incarnation, 0) + 1
        self._forget()

    def recent(self, hashes: Sequence[BlockHash]) -> dict[WorkerIncarnation, int]:
        """Return how many blocks of the prompt each worker has: up to the last one that no other computed after it.

        Earlier ones may have been computed elsewhere since, but a worker that has a block has all blocks before it.
        """
        matched: dict[WorkerIncarnation, int] = {}
        for position, block_hash in enumerate(hashes, 1):
            chain = self._recent.get(block_hash)
            if chain is None or chain.computed_at is None:
                break
            matched[chain.computed_at] = position
        return matched

    def _use(self, request: RouteRequest, member: WorkerMember, num_blocks: int) -> _Chain:
        """Return the chain of the prompt's first blocks, as the most recently used one."""
        last = request.hashes[num_blocks - 1]
        chain = self._chains.pop(last, None)
        if chain is None:
            chain = _Chain(request.model, member.block_size, request.hashes[:num_blocks])
            self.num_bytes += chain.num_bytes
        self._chains[last] = chain
        chain.last_s = self._clock()
        return chain

    def _forget(self) -> None:
        while self.num_bytes > self._max_bytes and len(self._chains) > 1:
            oldest = self._chains.pop(next(iter(self._chains)))
            self.num_bytes -= oldest.num_bytes
            for block_hash in oldest.hashes:
                if self._recent.get(block_hash) is oldest:
                    del self._recent[block_hash]

    def top(self, live: Iterable[WorkerMember], limit: int) -> list[SharedPrefix]:
        """Return the prefixes that saved most tokens. Only hits on `live` workers, in their current epoch, count."""
        incarnations = {(member.worker_id, member.epoch) for member in live}
        latest = islice(
            ((last, chain) for last, chain in reversed(self._chains.items()) if chain.num_hits), _MAX_MATCHES
        )
        own: dict[BlockHash, dict[WorkerId, int]] = {}
        for last, chain in latest:
            if found := {key[0]: count for key, count in chain.num_hits.items() if key in incarnations}:
                own[last] = found
        below: dict[BlockHash, list[BlockHash]] = {last: [] for last in own}
        for last in own:
            for block_hash in self._chains[last].hashes:
                if block_hash in below:
                    below[block_hash].append(last)
        num_own = {last: sum(found.values()) for last, found in own.items()}

        def rank(last: BlockHash) -> tuple[int, BlockHash]:
            chain = self._chains[last]
            return -sum(num_own[each] for each in below[last]) * len(chain.hashes) * chain.block_size, last

        return [self._shared(last, below[last], own) for last in sorted(own, key=rank)[:limit]]

    def _shared(
        self, last: BlockHash, below: Sequence[BlockHash], own: dict[BlockHash, dict[WorkerId, int]]
    ) -> SharedPrefix:
        """`below`: the prefixes that continue it, and itself."""
        chain = self._chains[last]
        hits: Counter[WorkerId] = Counter()
        for each in below:
            hits.update(own[each])
        return {
            "model": chain.model,
            "hash": index_entry(last).hex(),
            # Shorter shared prefixes, the shortest first, then this one.
            "path": [index_entry(block_hash).hex() for block_hash in chain.hashes if block_hash in own],
            "num_blocks": len(chain.hashes),
            "num_tokens": len(chain.hashes) * chain.block_size,
            "num_hits": hits.total(),  # requests whose match ended here or below
            "idle_s": max(0.0, self._clock() - max(self._chains[each].last_s for each in below)),
            "workers": [worker_id for worker_id, _ in sorted(hits.items(), key=lambda item: (-item[1], item[0]))],
        }


def tree_rows(prefixes: Sequence[SharedPrefix]) -> list[dict[str, Any]]:
    """Return rows in the order of a drawn tree, best siblings first; `parent` is the nearest row above."""
    known = {(prefix["model"], prefix["hash"]) for prefix in prefixes}
    children: dict[tuple[str, str | None], list[SharedPrefix]] = {}
    for prefix in prefixes:
        model = prefix["model"]
        above = (name for name in reversed(prefix["path"][:-1]) if (model, name) in known)
        children.setdefault((model, next(above, None)), []).append(prefix)

    def rows(model: str, parent: str | None, level: int) -> Iterator[dict[str, Any]]:
        for prefix in children.get((model, parent), ()):
            same = {name: prefix[name] for name in ("hash", "model", "num_tokens", "num_hits", "idle_s")}
            holders = {"workers": sorted(prefix["workers"][:MAX_HOLDERS]), "num_workers": len(prefix["workers"])}
            yield {**same, **holders, "parent": parent, "level": level}
            yield from rows(model, prefix["hash"], level + 1)

    models = dict.fromkeys(prefix["model"] for prefix in prefixes)
    return [row for model in models for row in rows(model, None, 1)]
