"""Cache events as vLLM and SGLang publish them: one msgpack batch a scheduler step.

    [ts, [event, ...], rank]     some vLLM of 2026 send a map of the three; each rank has its own socket
    event: {"type": "BlockStored", "block_hashes": [...], ...}

Fields with defaults may be missing, and unknown fields are skipped: so is `session_id`, which both engines give for
attribution only. Any request finds the blocks of a session's requests.
Sources: vllm/distributed/kv_events.py, sglang/srt/disaggregation/kv_events.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import Annotated, Any, Final

from msgspec import DecodeError, Meta, Struct, ValidationError
from msgspec.msgpack import Decoder
from msgspec.structs import asdict

EngineHash = int | bytes
"""A block's opaque name in its engine: an integer, or the raw bytes of a digest."""
_TokenId = Annotated[int, Meta(ge=0, lt=2**32)]

GPU: Final = "GPU"


class EventError(ValueError):
    """The bytes are not a batch of events."""


class BlockStored(Struct, frozen=True, tag=True):
    """A run of full blocks became findable after `parent_block_hash`. Each copy of a block is stored."""

    block_hashes: tuple[EngineHash, ...]
    parent_block_hash: EngineHash | None = None
    token_ids: tuple[_TokenId, ...] = ()
    """`block_size` tokens of each block, in order."""
    block_size: Annotated[int, Meta(ge=0)] = 1  # 0 only below the GPU, where vLLM may give none
    medium: str | None = None
    """Where the blocks are stored; None means the GPU."""
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    """Further inputs of each block's hash: LoRA name, images, salt of the first block, prompt embeddings."""
    group_idx: int | None = None
    """The KV group, for models whose layers differ in their attention."""
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    cache_salt: str | None = None
    """The salt of all these blocks (SGLang)."""
    is_bigram: bool = False
    """Each token was sent as a pair with the next one: a hit needs the next token, too (SGLang with EAGLE)."""

    def __post_init__(self) -> None:
        if not self.block_size and self.medium in (None, GPU):
            raise ValueError("block_size: 0")


class BlockRemoved(Struct, frozen=True, tag=True):
    """A copy of each block was evicted: in some versions any, in others the last one."""

    block_hashes: tuple[EngineHash, ...]
    medium: str | None = None
    group_idx: int | None = None
    remaining_copy_counts: tuple[Annotated[int, Meta(ge=0)], ...] | None = None
    """The remaining copies of each block; None if the version does not report them."""

    def with_counts(self) -> Iterable[tuple[EngineHash, int | None]]:
        """Return each block with the number of its remaining copies; None if that is not reported."""
        counts, names = self.remaining_copy_counts, self.block_hashes
        return zip(names, counts if counts and len(counts) == len(names) else repeat(None), strict=False)


class AllBlocksCleared(Struct, frozen=True, tag=True):
    """The engine's whole cache was reset."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct, frozen=True, array_like=True):
    """The events of one scheduler step, in order."""

    ts: float
    """The engine's wall clock."""
    events: tuple[Event, ...]


class _StoredPairs(BlockStored, frozen=True, tag="BlockStored"):
    token_ids: tuple[tuple[_TokenId, _TokenId], ...] = ()  # type: ignore[assignment]


class _PairsBatch(Struct, array_like=True):
    ts: float
    pair_events: tuple[_StoredPairs | BlockRemoved | AllBlocksCleared, ...]

    @property
    def events(self) -> tuple[Event, ...]:
        return tuple(
            BlockStored(
                **asdict(event) | {"token_ids": tuple([pair[0] for pair in event.token_ids]), "is_bigram": True}
            )
            if isinstance(event, _StoredPairs)
            else event
            for event in self.pair_events
        )


class _MapBatch(Struct):
    ts: float
    events: tuple[Event, ...]


_DECODERS: Final = (Decoder(EventBatch), Decoder(_MapBatch), Decoder(_PairsBatch))


def decode_batch(payload: bytes) -> EventBatch:
    """Decode a batch in any layout. Raises only EventError."""
    mismatches = []
    try:
        for decoder in _DECODERS:
            try:
                batch = decoder.decode(payload)
            except ValidationError as mismatch:
                mismatches.append(str(mismatch))
            else:
                return batch if isinstance(batch, EventBatch) else EventBatch(batch.ts, batch.events)
    except (DecodeError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise EventError(f"no batch of events: {error}") from None
    raise EventError(f"no batch of events: {'; or '.join(mismatches)}")
