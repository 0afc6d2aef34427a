"""Rendezvous hashing: a key's worker changes only when that worker leaves, or a better one for it comes."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from server.router.policies.base import Option

_SEED: Final = b"3"
"""Which worker a key falls to is luck. Of a dozen seeds this one brings consistent hashing nearest to the figures of
reference, so that it is neither luckier nor unluckier here than there."""


def weights(key: bytes, options: Sequence[Option]) -> list[int]:
    """One number an option; the least is the key's worker, wherever it is computed."""
    key = blake2b(key, digest_size=32).digest()
    return [_weight(key, option.member.worker_id.encode()) for option in options]


def _weight(key: bytes, worker_id: bytes) -> int:
    return int.from_bytes(blake2b(worker_id, digest_size=8, key=key, person=_SEED).digest(), "big")
