"""The block hash: one function for gateway and worker, so both give a block the same name.

H is BLAKE2b truncated to 16 bytes, personalised for each use, so a root never equals a link. The salt is a secret of
the server side. Every link hashes its parent first, so the salt keys the whole chain. A weak hash would be faster, but
collidable (CVE-2025-25183).
Source: docs/architecture/blocks.md, "The block hash". The golden vectors in tests/cache/test_hashing.py fix the format.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from msgspec import Struct

from cache.types import HASH_BYTES, INDEX_ENTRY_BYTES, BlockHash, IndexEntry

FORMAT_VERSION: Final = b"1"
_ROOT_PERSON: Final = b"headstart-root"
_LINK: Final = blake2b(digest_size=HASH_BYTES, person=b"headstart-block")
"""Copied for every link: setting one up takes 1.5 times as long as hashing a block."""
_FINGERPRINT_PERSON: Final = b"headstart-space"
_TOKEN_BYTES: Final = 4  # an id is hashed as 32 bits


@dataclass(frozen=True, slots=True)
class Namespace:
    """All properties that must agree before two caches may share block hashes.

        root = H(format version, model, revision, tokenizer fingerprint, block size, adapter, tenant salt)
        h_i  = H(h_{i-1} || token ids of block i as u32 little-endian || media)   full blocks only

    `media` is empty for most blocks. See `encode_media`.
    """

    model: str
    revision: str
    tokenizer: str
    block_size: int

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")

    @property
    def fingerprint(self) -> str:
        """32 hex digits that a worker announces and a gateway compares with its own."""
        return blake2b(encode_fields(self._fields()), digest_size=HASH_BYTES, person=_FINGERPRINT_PERSON).hexdigest()

    def root(self, *, salt: bytes, adapter: str = "") -> BlockHash:
        """Return the parent of every first block of one tenant; `salt` is a secret of the server side."""
        fields = self._fields()
        fields[b"adapter"] = adapter.encode()
        fields[b"salt"] = salt
        return BlockHash(blake2b(encode_fields(fields), digest_size=HASH_BYTES, person=_ROOT_PERSON).digest())

    def _fields(self) -> dict[bytes, bytes]:
        return {
            b"version": FORMAT_VERSION,
            b"model": self.model.encode(),
            b"revision": self.revision.encode(),
            b"tokenizer": self.tokenizer.encode(),
            b"block_size": str(self.block_size).encode(),
        }


def encode_fields(fields: dict[bytes, bytes]) -> bytes:
    """Encode tags and values, each after its length: no two field sets share an encoding."""
    return b"".join(len(part).to_bytes(4, "little") + part for field in fields.items() for part in field)


def encode_tokens(token_ids: Sequence[int]) -> bytes:
    """Return token ids as consecutive u32 little-endian. Raises OverflowError for an id outside 0..2**32-1."""
    encoded = array("I", token_ids)
    if sys.byteorder == "big":
        encoded.byteswap()
    return encoded.tobytes()


def decode_tokens(encoded: bytes) -> list[int]:
    """Return the token ids of `encode_tokens`. Raises ValueError for bytes that are none."""
    token_ids = array("I")
    token_ids.frombytes(encoded)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids.tolist()


def check_hashes(joined: bytes) -> None:
    """Raise ValueError for bytes that are not whole hashes."""
    if len(joined) % HASH_BYTES:
        raise ValueError(f"hashes: {len(joined)} bytes are not a whole number of hashes of {HASH_BYTES}")


def split_hashes(joined: bytes) -> list[BlockHash]:
    return [block_hash for (block_hash,) in struct.iter_unpack(f"{HASH_BYTES}s", joined)]


class MediaStart(Struct, frozen=True, array_like=True, gc=False):
    """An image in a prompt, or another medium that an engine takes."""

    identity: str
    """The engine's name for its content."""
    position: int
    """The first of its placeholder tokens."""


def encode_media(media: Sequence[MediaStart], block_size: int) -> dict[int, bytes]:
    """Return what media append to the hashed input of blocks, by the number of the block.

    It is u32 length || identity || u32 offset in the block, for each medium that begins there. Later blocks of a medium
    need nothing: their hashes cover that block.
    """
    encoded: dict[int, bytes] = {}
    for each in media:
        number, offset = divmod(each.position, block_size)
        identity = each.identity.encode()
        entry = len(identity).to_bytes(4, "little") + identity + offset.to_bytes(4, "little")
        encoded[number] = encoded.get(number, b"") + entry
    return encoded


def hash_chain(
    parent: BlockHash, token_ids: Sequence[int], block_size: int, media: Sequence[MediaStart] = ()
) -> list[BlockHash]:
    """Return the hashes of the full blocks of `token_ids`, in order; a partial last block has none.

    `media`: those that begin in `token_ids`, in order.
    """
    encoded = encode_tokens(token_ids)
    of_media = encode_media(media, block_size) if media else None
    stride = block_size * _TOKEN_BYTES
    hashes: list[BlockHash] = []
    last = parent
    for start in range(0, len(encoded) - stride + 1, stride):
        link = _LINK.copy()
        link.update(last)
        link.update(encoded[start : start + stride])
        if of_media is not None and (entries := of_media.get(start // stride)) is not None:
            link.update(entries)
        last = BlockHash(link.digest())
        hashes.append(last)
    return hashes


def extend_chain(
    chain: list[BlockHash], root: BlockHash, token_ids: Sequence[int], num_blocks: int, block_size: int
) -> None:
    """Append the missing hashes of the first `num_blocks` blocks to `chain`, which begins at `root`."""
    if len(chain) < num_blocks:
        parent = chain[-1] if chain else root
        chain += hash_chain(parent, token_ids[len(chain) * block_size : num_blocks * block_size], block_size)


def index_entry(block_hash: BlockHash) -> IndexEntry:
    """Return the truncated hash, which names a block in the shared index."""
    return IndexEntry(block_hash[:INDEX_ENTRY_BYTES])
