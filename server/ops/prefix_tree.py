"""The prefixes at which matches ended, as operators see them: the best ones, and the rows of a drawn tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

from cache.hashing import index_entry
from cache.records import WorkerMember
from cache.types import BlockHash, WorkerId
from server.router.ledger import Ledger

_MAX_MATCHES: Final = 2048
"""The latest prefixes with hits of which the tree is made."""
MAX_ROWS: Final = 16  # bounds a frame of the dashboard's feed
MAX_HOLDERS: Final = 6
"""Workers named in a row; the rest are counted."""
SharedPrefix = dict[str, Any]
"""A prefix at which matches ended, as JSON. Hashes are 8 bytes in hex, as in Redis."""


def top(ledger: Ledger, live: Iterable[WorkerMember], limit: int) -> list[SharedPrefix]:
    """Return the prefixes that saved most tokens. Only hits on `live` workers, in their current epoch, count."""
    incarnations = {(member.worker_id, member.epoch) for member in live}
    chains = ledger.chains
    latest = islice(((last, chain) for last, chain in reversed(chains.items()) if chain.num_hits), _MAX_MATCHES)
    own: dict[BlockHash, dict[WorkerId, int]] = {}
    for last, chain in latest:
        if found := {key[0]: count for key, count in chain.num_hits.items() if key in incarnations}:
            own[last] = found
    # The prefixes that continue each, and itself.
    below: dict[BlockHash, list[BlockHash]] = {last: [] for last in own}
    for last in own:
        for block_hash in chains[last].hashes:
            if block_hash in below:
                below[block_hash].append(last)
    num_own = {last: sum(found.values()) for last, found in own.items()}

    def rank(last: BlockHash) -> tuple[int, BlockHash]:
        chain = chains[last]
        return -sum(num_own[each] for each in below[last]) * len(chain.hashes) * chain.block_size, last

    def shared(last: BlockHash) -> SharedPrefix:
        chain = chains[last]
        hits: Counter[WorkerId] = Counter()
        for each in below[last]:
            hits.update(own[each])
        return {
            "model": chain.model,
            "hash": index_entry(last).hex(),
            # Shorter shared prefixes, the shortest first, then this one.
            "path": [index_entry(block_hash).hex() for block_hash in chain.hashes if block_hash in own],
            "num_blocks": len(chain.hashes),
            "num_tokens": len(chain.hashes) * chain.block_size,
            "num_hits": hits.total(),  # requests whose match ended here or below
            "idle_s": max(0.0, ledger.clock() - max(chains[each].last_s for each in below[last])),
            "workers": [worker_id for worker_id, _ in sorted(hits.items(), key=lambda item: (-item[1], item[0]))],
        }

    return [shared(last) for last in sorted(own, key=rank)[:limit]]


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
