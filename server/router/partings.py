"""The places where conversations part from what the gateway has seen, counted by block hashes: no text is kept.

known prompts     |====== system, tools ======|== messages ==|
a conversation    |====== system, tools ======|-- others ----|      parts at token 18,816 of 20,348
its next turn     |====== system, tools ======|-- others ----|-- more --|      goes on, and parts from nothing
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from cache.types import BlockHash
from server.router.types import RouteRequest

MAX_BLOCKS: Final = 1 << 15
"""Blocks in each of the two generations: about 5 MB."""
MAX_CLIENTS: Final = 256
MAX_PLACES: Final = 16
"""Places remembered of each client."""
MAX_PARTING_ROWS: Final = 8

Field = str
"""The part of the prompt: `system`, `tools`, `messages`, `prompt`, or empty if none has the text."""


@dataclass(slots=True, eq=False)
class _Generation:
    """Blocks of prompts, and the last one of each. Every prefix of a known block is known."""

    blocks: set[BlockHash] = field(default_factory=set)
    ends: set[BlockHash] = field(default_factory=set)

    def depth(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many blocks of a prompt are known."""
        if hashes[0] not in self.blocks:
            return 0
        return bisect_left(hashes, True, 1, key=lambda block_hash: block_hash not in self.blocks)


@dataclass(slots=True, eq=False)
class _Place:
    """The conversations of a client that parted at one block."""

    field: Field
    num_conversations: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens of the latest one."""
    last_s: float = 0.0


class Partings:
    """Count where new conversations part from known prompts, by tenant, model and client."""

    def __init__(self, clock: Callable[[], float], max_blocks: int = MAX_BLOCKS) -> None:
        self._clock = clock
        self._max_blocks = max_blocks
        self._young = _Generation()
        self._old = _Generation()
        self._clients: dict[tuple[str, str, str], dict[int, _Place]] = {}
        """Places by the token at which they begin. Both dicts have the least recently used first."""

    def add(self, request: RouteRequest, client: str, block_size: int, field_at: Callable[[int], Field]) -> None:
        """Compare a request with the known ones. `field_at` names the field at a token; it is called for new places."""
        hashes = request.hashes
        if not hashes:
            return
        num_young = self._young.depth(hashes)
        num_known = num_young if num_young == len(hashes) else max(num_young, self._old.depth(hashes))
        last = hashes[num_known - 1]
        goes_on = num_known == len(hashes) or (num_known > 0 and (last in self._young.ends or last in self._old.ends))
        self._learn(hashes, num_young)
        key = (request.tenant, request.lora or request.model, client)
        places = self._clients.pop(key, None)
        is_first = places is None and not num_known
        places = self._clients[key] = {} if places is None else places
        if len(self._clients) > MAX_CLIENTS:
            del self._clients[next(iter(self._clients))]
        if goes_on or is_first:
            return
        token = num_known * block_size
        place = places.pop(token, None) or _Place(field_at(token))
        places[token] = place
        if len(places) > MAX_PLACES:
            del places[next(iter(places))]
        place.num_conversations += 1
        place.num_prompt_tokens = request.num_prompt_tokens
        place.last_s = self._clock()

    def _learn(self, hashes: Sequence[BlockHash], num_young: int) -> None:
        if len(self._young.blocks) + len(hashes) - num_young > self._max_blocks:
            self._old, self._young, num_young = self._young, _Generation(), 0
        self._young.blocks.update(hashes[num_young : self._max_blocks])
        self._young.ends.add(hashes[-1])

    def top(self, limit: int = MAX_PARTING_ROWS, tenant: str | None = None) -> list[dict[str, Any]]:
        """Return the places after which most tokens were computed, as JSON. `tenant`: only those of this tag."""
        rows = [
            {
                "client": client,
                "tenant": tag,
                "model": model,
                "field": place.field,
                "part_tokens": token,
                "prompt_tokens": place.num_prompt_tokens,
                "num_conversations": place.num_conversations,
                "idle_s": max(0.0, self._clock() - place.last_s),
            }
            for (tag, model, client), places in self._clients.items()
            if tenant is None or tag == tenant
            for token, place in places.items()
        ]
        return sorted(rows, key=_computed_tokens, reverse=True)[:limit]


def _computed_tokens(row: dict[str, Any]) -> int:
    computed: int = row["num_conversations"] * (row["prompt_tokens"] - row["part_tokens"])
    return computed
