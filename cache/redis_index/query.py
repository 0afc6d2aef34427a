"""The packed command of a lookup, and how its reply is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache.redis_index import schema
from cache.redis_index.client import Argument, pack
from cache.redis_index.registry import KnownWorker
from cache.redis_index.schema import Keys, ReplyError, brief
from cache.redis_index.script import ALL_STATES, LOOKUP_SHA, SHORT_STATES
from cache.types import TIERS


@dataclass(frozen=True, slots=True)
class Query:
    """The lookup command for some workers, packed, before and after the prompt's hashes."""

    workers: tuple[KnownWorker, ...]
    with_states: tuple[bytes, bytes]
    without_states: tuple[bytes, bytes]
    has_all_states: bool
    """`with_states` reads those of all workers of the shard."""
    links: tuple[int, ...]
    """For each set of a tier, the index of the match that it continues."""
    places: tuple[tuple[int, ...], ...]
    """For each worker, the indices of its tiers' matches."""
    block_sizes: frozenset[int]
    """Those of the workers with ends."""

    def split(self, matches: list[int], num_blocks: int) -> tuple[list[int], Sequence[tuple[int, ...]]]:
        """Return each worker's match in its pool, and those in its tiers. A bad reply may raise anything."""
        num_pools, num_tiers = len(self.workers), len(self.links)
        if len(matches) != num_pools + num_tiers or (matches and not 0 <= min(matches) <= max(matches) <= num_blocks):
            raise ReplyError(f"{brief(matches)} for {num_pools} workers, {num_tiers} tiers and {num_blocks} blocks")
        if not any(self.places):
            return matches, self.places
        if any(matches[link] > match for link, match in zip(self.links, matches[num_pools:], strict=True)):
            raise ReplyError(f"a match in a tier ends before the one that it continues: {brief(matches)}")
        return matches[:num_pools], [tuple([matches[at] for at in places]) for places in self.places]


def make_query(evalsha: bytes, keys: Keys, workers: Sequence[KnownWorker], *, by_name: bool, guarded: bool) -> Query:
    """Return the lookup among `workers`. `by_name`: read their states only, if `guarded` without those too long."""
    sets = [keys.pool(w.member, w.state.set_version) for w in workers]
    has_ends = [w.member.ends in schema.KNOWN_ENDS for w in workers]
    places = [[at] for at in range(len(workers))]
    links = []
    # All first tiers, then all second ones: the neighbour's answer is the search hint.
    for depth in range(max((len(w.member.tiers) for w in workers), default=0)):
        for w, own in zip(workers, places, strict=True):
            for tier in w.member.tiers[depth : depth + 1]:
                if tier not in TIERS or w.member.ends:
                    own.append(own[-1])
                    continue
                links.append(own[-1])
                own.append(len(sets))
                sets.append(keys.blocks(w.member.worker_id, w.member.epoch, w.state.set_version, tier))
    guard = [SHORT_STATES] if guarded else []
    ids = [*guard, *(w.member.worker_id for w in workers)] if by_name else [ALL_STATES]
    packed_links = b"".join(link.to_bytes(2, "big") for link in links)
    ends = bytes(has_ends) if any(has_ends) else b""
    all_keys = [keys.states, keys.version, *sets]
    command: list[Argument] = [evalsha, LOOKUP_SHA, len(all_keys), *all_keys, b"\0", packed_links, ends]
    block_sizes = frozenset(w.member.block_size for w, has in zip(workers, has_ends, strict=True) if has)
    return Query(
        tuple(workers),
        _around_hashes([*command, *ids]),
        _around_hashes(command),
        not by_name,
        tuple(links),
        tuple(tuple(own[1:]) for own in places),
        block_sizes,
    )


def _around_hashes(command: list[Argument]) -> tuple[bytes, bytes]:
    """Pack a lookup, and return what comes before and after the prompt's hashes."""
    head, tail = pack([command]).split(b"$1\r\n\0", 1)  # their place: no key has a zero byte
    return head, tail
