"""The record of a block, on disk and between workers: a header and the block's KV.

    magic | version | fingerprint | block hash | parent | depth | payload bytes | check | digest | payload
    4     | u32     | 16          | 16         | 16     | u32   | u32           | 8     | 16     | ...

Integers are little-endian. The check is BLAKE2b over everything before it, so a header can be verified by itself. The
digest is truncated HMAC-SHA-256 over everything before it and the payload. With a cluster secret both are MACs: an
attacker with write access to the disk or the network cannot inject KV.
"""

from __future__ import annotations

import hmac
import struct
import sys
from hashlib import blake2b
from typing import Final

from cache.hashing import encode_fields
from cache.types import HASH_BYTES, BlockHash, ChainLink

FORMAT_VERSION: Final = 2  # in each header: a record of another form is a miss
_MAGIC: Final = b"HSKV"
_FIELDS: Final = struct.Struct("<4sI16s16s16sII")
_CHECK_BYTES: Final = 8  # of the header: a damaged one is found without its payload
_DIGEST_BYTES: Final = 16  # no forger guesses 128 bits
HEADER_BYTES: Final = _FIELDS.size + _CHECK_BYTES + _DIGEST_BYTES
MAX_PAYLOAD_BYTES: Final = 1 << 30
"""A record is read by one system call, and Linux reads 2 GiB at most."""
_CHECK_PERSON: Final = b"headstart-header"
_LAYOUT_PERSON: Final = b"headstart-layout"
_FORMAT_PERSON: Final = b"headstart-format"


def layout_fingerprint(
    *, namespace: str, files: str, numerics: str, dtype: str, shape: tuple[int, int, int, int]
) -> bytes:
    """Return 16 bytes that are equal only if the bytes of a block mean the same KV.

    `namespace` is `Namespace.fingerprint`, `files` the digest of the model's files. `shape`: layers, KV heads, numbers
    of a head, tokens of a block. The byte order is this machine's.
    """
    layout = {
        b"namespace": namespace.encode(),
        b"files": files.encode(),
        b"numerics": numerics.encode(),
        b"dtype": dtype.encode(),
        b"shape": struct.pack("<4Q", *shape),
        b"byte_order": sys.byteorder.encode(),
    }
    return blake2b(encode_fields(layout), digest_size=HASH_BYTES, person=_LAYOUT_PERSON).digest()


class RecordFormat:
    """Makes and verifies the headers of one layout. Any thread may use it; payloads are hashed without the GIL."""

    def __init__(self, layout: bytes, payload_bytes: int, cluster_secret: bytes = b"") -> None:
        """`layout`: see `layout_fingerprint`. Without a secret the digest only detects damage. Raises ValueError."""
        if not 1 <= payload_bytes <= MAX_PAYLOAD_BYTES:
            raise ValueError(f"a block has 1 to {MAX_PAYLOAD_BYTES:,} bytes of KV, got {payload_bytes:,}")
        self.payload_bytes = payload_bytes
        self.record_bytes = HEADER_BYTES + payload_bytes
        key = hmac.digest(cluster_secret, b"headstart block record\0", "sha256") if cluster_secret else b""
        self._check = blake2b(digest_size=_CHECK_BYTES, key=key, person=_CHECK_PERSON)
        self._digest = hmac.new(
            key, digestmod="sha256"
        )  # twice as fast as BLAKE2b: processors have instructions for it
        # Keyed, too: records under another secret are refused without reading their payloads.
        fields = {b"version": bytes([FORMAT_VERSION]), b"layout": layout, b"payload": str(payload_bytes).encode()}
        fingerprint = blake2b(encode_fields(fields), digest_size=HASH_BYTES, key=key, person=_FORMAT_PERSON)
        self._fingerprint = fingerprint.digest()
        self.fingerprint = self._fingerprint.hex()
        """32 hex digits, equal only if workers can use each other's records."""

    def header(self, link: ChainLink, payload: memoryview) -> bytes:
        """Return the HEADER_BYTES that go before the payload."""
        start = self._start(link)
        return start + self._digest_of(start, payload)

    def verifies(self, header: bytes | bytearray, link: ChainLink, payload: memoryview) -> bool:
        """Return whether header and payload are undamaged and of this block."""
        start = self._start(link)
        if len(header) != HEADER_BYTES or header[: len(start)] != start or payload.nbytes != self.payload_bytes:
            return False
        return hmac.compare_digest(header[len(start) :], self._digest_of(start, payload))

    def find_link(self, header: bytes) -> ChainLink | None:
        """Return the block of a header, or None if the header is damaged or of another format. Ignores the payload."""
        if len(header) != HEADER_BYTES:
            return None
        *_, block_hash, parent, depth, _ = _FIELDS.unpack_from(header)
        link = ChainLink(BlockHash(block_hash), BlockHash(parent), depth)
        return link if hmac.compare_digest(header[:-_DIGEST_BYTES], self._start(link)) else None

    def _start(self, link: ChainLink) -> bytes:
        """Return the header without its digest."""
        hashes = (self._fingerprint, link.block_hash, link.parent)
        fields = _FIELDS.pack(_MAGIC, FORMAT_VERSION, *hashes, link.depth, self.payload_bytes)
        check = self._check.copy()
        check.update(fields)
        return fields + check.digest()

    def _digest_of(self, start: bytes, payload: memoryview) -> bytes:
        digest = self._digest.copy()
        digest.update(start)
        digest.update(payload)
        return digest.digest()[:_DIGEST_BYTES]
