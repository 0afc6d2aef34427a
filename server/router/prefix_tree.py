"""The tree of the prefixes that requests share most, and the workers that hold them.

system prompt, 1,360 tokens       worker-0 worker-1        each row extends the one above it
+-- a conversation, 2,912         worker-0
+-- another, 4,000                worker-1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from cache.hashing import index_entry
from cache.records import WorkerMember
from cache.types import BlockHash, Epoch, WorkerId
from server.router.types import RouteRequest

MAX_MATCHES: Final = 2048
MAX_BLOCKS: Final = 1 << 16
"""Blocks of all matches, shared ones counted once per match: about 4 MB."""
MAX_INCARNATIONS: Final = 4096
"""Workers remembered per match."""
MAX_ROWS: Final = 16
MAX_HOLDERS: Final = 6
"""Workers named in a row; the rest are counted."""


SharedPrefix = dict[str, Any]
"""A prefix at which matches ended, as JSON. Hashes are 8 bytes in hex, as in Redis."""


@dataclass(slots=True, eq=False)
class _Match:
    """The matches that ended with one block."""

    model: str
    block_size: int
    hashes: Sequence[BlockHash]
    last_s: float = 0.0
    num_hits: dict[tuple[WorkerId, Epoch], int] = field(default_factory=dict)


class PrefixTree:
    """Count the prefixes that this gateway's requests found cached, and forget the least recently found."""

    def __init__(self, clock: Callable[[], float], max_blocks: int = MAX_BLOCKS) -> None:
        self._clock = clock
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._matches: dict[BlockHash, _Match] = {}
        """By the last block, least recently found first."""

    def add(self, request: RouteRequest, member: WorkerMember, num_cached_tokens: int) -> None:
        """Count one request and its cached tokens. O(1), plus one slice for a new prefix."""
        num_blocks = min(num_cached_tokens // member.block_size, len(request.hashes))
        if num_blocks <= 0:
            return
        last = request.hashes[num_blocks - 1]
        match = self._matches.pop(last, None)
        if match is None:
            match = _Match(request.model, member.block_size, request.hashes[:num_blocks])
            self._num_blocks += num_blocks
        self._matches[last] = match
        match.last_s = self._clock()
        incarnation = (member.worker_id, member.epoch)
        match.num_hits[incarnation] = match.num_hits.get(incarnation, 0) + 1
        if len(match.num_hits) > MAX_INCARNATIONS:
            del match.num_hits[next(iter(match.num_hits))]
        while len(self._matches) > MAX_MATCHES or (self._num_blocks > self._max_blocks and len(self._matches) > 1):
            oldest = self._matches.pop(next(iter(self._matches)))
            self._num_blocks -= len(oldest.hashes)

    def top(self, live: Iterable[WorkerMember], limit: int) -> list[SharedPrefix]:
        """Return the prefixes that saved most tokens. Only hits on `live` workers, in their current epoch, count."""
        incarnations = {(member.worker_id, member.epoch) for member in live}
        own: dict[BlockHash, dict[WorkerId, int]] = {}
        for last, match in self._matches.items():
            found = {key[0]: count for key, count in match.num_hits.items() if key in incarnations}
            if found:
                own[last] = found
        below: dict[BlockHash, list[BlockHash]] = {
            last: [] for last in own
        }  # the prefixes that continue it, and itself
        for last in own:
            for block_hash in self._matches[last].hashes:
                if block_hash in below:
                    below[block_hash].append(last)
        num_own = {last: sum(found.values()) for last, found in own.items()}

        def rank(last: BlockHash) -> tuple[int, BlockHash]:
            match = self._matches[last]
            return -sum(num_own[each] for each in below[last]) * len(match.hashes) * match.block_size, last

        return [self._shared(last, below[last], own) for last in sorted(own, key=rank)[:limit]]

    def _shared(
        self, last: BlockHash, below: Sequence[BlockHash], own: dict[BlockHash, dict[WorkerId, int]]
    ) -> SharedPrefix:
        match = self._matches[last]
        hits: Counter[WorkerId] = Counter()
        for each in below:
            hits.update(own[each])
        return {
            "model": match.model,
            "hash": index_entry(last).hex(),
            # Shorter shared prefixes, the shortest first, then this one.
            "path": [index_entry(block_hash).hex() for block_hash in match.hashes if block_hash in own],
            "num_blocks": len(match.hashes),
            "num_tokens": len(match.hashes) * match.block_size,
            "num_hits": hits.total(),  # requests whose match ended here or below
            "idle_s": max(0.0, self._clock() - max(self._matches[each].last_s for each in below)),
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
