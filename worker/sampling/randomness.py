"""Randomness as a function of (seed, position): it keeps no state, so a resumed stream draws what the first would."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

_MASK: Final = (1 << 64) - 1
_PERSON: Final = b"headstart-draw"
_MANTISSA_BITS: Final = 53


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for the token at `position` of a sequence. Seeds count modulo 2**64."""
    counter = (seed & _MASK).to_bytes(8, "little") + position.to_bytes(8, "little")
    digest = blake2b(counter, digest_size=8, person=_PERSON).digest()
    return (int.from_bytes(digest, "little") >> (64 - _MANTISSA_BITS)) / (1 << _MANTISSA_BITS)
