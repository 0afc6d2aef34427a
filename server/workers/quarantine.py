"""Requests that have broken a worker, by a hash of all that decides what is computed. They are refused for a while."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final

import msgspec

from cache.types import BlockHash
from worker.wire import SamplingParams

TTL_S: Final = 60.0
"""Long enough to end a client's retries; short, because a worker may have failed for a reason of its own."""
MAX_ENTRIES: Final = 10_000


class Quarantine:
    """One gateway's; each learns by itself."""

    def __init__(self, *, ttl_s: float = TTL_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._until_s: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, root: BlockHash, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        while len(self._until_s) >= MAX_ENTRIES:
            del self._until_s[next(iter(self._until_s))]
        self._until_s[_key(root, prompt_ids, sampling)] = self._clock() + self._ttl_s

    def holds(self, root: BlockHash, prompt_ids: Sequence[int], sampling: SamplingParams) -> bool:
        """Costs nothing while nobody is in quarantine."""
        if not self._until_s:
            return False
        key = _key(root, prompt_ids, sampling)
        until_s = self._until_s.get(key)
        if until_s is not None and until_s <= self._clock():
            del self._until_s[key]
            return False
        return until_s is not None


def _key(root: BlockHash, prompt_ids: Sequence[int], sampling: SamplingParams) -> bytes:
    digest = blake2b(root, digest_size=16)
    digest.update(array("I", prompt_ids).tobytes())
    digest.update(msgspec.msgpack.encode(sampling))
    return digest.digest()
