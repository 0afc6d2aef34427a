"""The exchange of blocks and chains between workers: the messages, and an engine's side of it.

POST /blocks: BlocksWanted ->     <- a msgpack bin of each record (see `cache.block_record`), up to the first miss
POST /chains: ChainsWanted ->     <- Handover: the chains that the worker used last, for one that joins
POST /adopt: Handover ->          <- {"adopted_blocks": how many came}, from a worker that leaves
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Protocol, TypeVar

from msgspec import Meta, Struct

from cache.block_record import HEADER_BYTES
from cache.hashing import check_hashes, split_hashes
from cache.types import HASH_BYTES, BlockHash, ChainLink

MAX_BLOCKS: Final = 1 << 16  # 1 MiB of hashes in a message
MAX_CHAINS: Final = 4096  # with MAX_BLOCKS, an answer stays below MAX_CHAINS_BYTES
MAX_CHAINS_BYTES: Final = 4 << 20
"""Bound of an answer to POST /chains or /adopt."""
FRAME_HEAD_BYTES: Final = 5  # _BIN32, and 32 bits of length
_BIN32: Final = b"\xc6"

T = TypeVar("T")
_Hash = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]


class BlocksWanted(Struct, frozen=True):
    """Blocks of one chain, in order."""

    epoch: str
    layout: str
    """`RecordFormat.fingerprint` of the asking worker."""
    parent: _Hash
    """The parent of the first block."""
    depth: Annotated[int, Meta(ge=0, lt=1 << 31)]
    """Blocks before the first one."""
    hashes: Annotated[bytes, Meta(max_length=MAX_BLOCKS * HASH_BYTES)]
    """One after the other."""
    background: bool = False
    """No request waits for them: a worker that serves requests sends them slowly, so that its streams are not late."""

    def __post_init__(self) -> None:
        check_hashes(self.hashes)

    def links(self) -> list[ChainLink]:
        hashes = split_hashes(self.hashes)
        parents = [BlockHash(self.parent), *hashes]
        return [ChainLink(each, parents[n], self.depth + n) for n, each in enumerate(hashes)]


class OfferedChain(Struct, frozen=True):
    """A chain of blocks, beginning with its first."""

    root: _Hash
    hashes: Annotated[bytes, Meta(max_length=MAX_BLOCKS * HASH_BYTES)]

    def __post_init__(self) -> None:
        check_hashes(self.hashes)

    @classmethod
    def of(cls, chain: Sequence[ChainLink]) -> OfferedChain:
        return cls(chain[0].parent, b"".join(link.block_hash for link in chain))

    @property
    def num_blocks(self) -> int:
        return len(self.hashes) // HASH_BYTES

    def block_hashes(self) -> list[BlockHash]:
        return split_hashes(self.hashes)


class Handover(Struct, frozen=True):
    """The chains of a worker, for another one to fetch."""

    url: str
    epoch: str
    layout: str
    chains: Annotated[tuple[OfferedChain, ...], Meta(max_length=MAX_CHAINS)]


class ChainsWanted(Struct, frozen=True):
    """Asks for the chains that a worker used last."""

    epoch: str
    layout: str
    """`RecordFormat.fingerprint` of the asking worker."""
    max_blocks: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)]
    """A block that several chains share counts once."""


class BlockExchange(Protocol):
    """Moves an engine's blocks to its peers, and theirs here."""

    @property
    def layout(self) -> str:
        """`RecordFormat.fingerprint`: equal at engines that can take each other's blocks."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""

    async def adopt(self, url: str, epoch: str, chain: OfferedChain) -> int:
        """Fetch a chain of the worker at `url` into the pool, and return how many blocks came.

        If it is cancelled, blocks may still come.
        """

    async def ask(
        self, url: str, epoch: str, message: ChainsWanted | Handover, answer: type[T], timeout_s: float
    ) -> T | None:
        """Send a message to the worker at `url`, in this epoch, and return its answer. None: it gives none in time."""

    async def latest_chains(self, max_blocks: int) -> list[OfferedChain]:
        """Return the chains used last, the latest first, of `max_blocks` blocks at most; a shared one counts once."""

    def new_payload(self) -> memoryview:
        """Return room for one payload."""

    def read_record(self, link: ChainLink, payload: memoryview) -> bytes | None:
        """Fill `payload` with a block and return its record's header; None: it is not here. Any thread."""


def frame_head(payload_bytes: int) -> bytes:
    """Return the msgpack head of a record with such a payload."""
    return _BIN32 + (HEADER_BYTES + payload_bytes).to_bytes(4, "big")
