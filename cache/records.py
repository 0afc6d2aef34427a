"""The records that workers publish and gateways read, and the protocol of the prefix index.

The index is a hint. A stale or poisoned one costs speed, never a token: a worker trusts only its own pool.

A field with a list of values is an `Annotated[str, Literal[...]]`, here and in `worker.wire`: a newer peer may send
another value. An unknown value disables that feature, never the peer. A plain Literal would refuse the whole message.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Final, Literal, Protocol

import msgspec

from cache.types import BlockHash, Epoch, GatewayId, TierName, WorkerId

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_ID: Final = msgspec.Meta(pattern=r"\A[!-~]{1,256}\Z")
"""Ids of workers and epochs stand in headers, metrics and logs: only visible ASCII."""
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class WorkerLoad(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A worker's load, rewritten after a step, at most every 50 ms.

    A struct decodes ten times as fast as a frozen dataclass. A gateway decodes one per worker at every decision.
    """

    queued_prefill_s: dict[GatewayId, _Seconds] = msgspec.field(default_factory=dict)
    """Estimated prefill seconds of requests without a first token, by the gateway that sent them."""
    assigned_prefill_s: _Seconds = 0.0
    """Prefill seconds ever assigned in this epoch: a counter, from which gateways derive the fleet's load."""
    prefill_tokens_per_s: _Seconds = 0.0
    """Measured prefill rate, without the fixed part of a prefill; 0.0 before the first measurement."""
    num_running: Count = 0
    num_waiting: Count = 0
    num_free_blocks: Count = 0
    """Without the blocks that the prefills in progress will still take."""
    num_blocks: Count = 0
    draining: bool = False
    start_interval_s: _Seconds = 0.0
    """Mean time between two requests that leave the queue while others wait; 0.0 while none has waited."""
    tier_tokens_per_s: tuple[_Seconds, ...] = ()
    """Measured rate of fetches into the pool from each of `WorkerMember.tiers`; 0.0: unknown."""
    fetch_tokens_per_s: _Seconds = 0.0
    """Measured rate of fetches into the pool from another worker; 0.0: it fetches none."""
    is_slow: bool = False
    """Its engine was slow to answer recently: prefer others."""
    bounded_prefill_tokens_per_s: _Seconds = 0.0
    """Not read: workers of 0.1 send it."""
    problem: str = ""
    """Why it takes no request; empty if it does, or drains."""
    prefill_fixed_s: _Seconds = 0.0
    """Measured part of a prefill's time that its tokens do not change; 0.0: unknown."""
    is_rate_unsure: bool = False
    """Tokens were less than a third of the measured prefills: of two that differ in length only the sum is sure."""


@dataclass(frozen=True, slots=True)
class WorkerMember:
    """A worker's description of itself, constant during an epoch. Readers ignore unknown fields."""

    worker_id: Annotated[WorkerId, _ID]
    epoch: Annotated[Epoch, _ID]
    url: str
    model: str
    namespace: str
    """`Namespace.fingerprint`: a gateway refuses a worker with another fingerprint."""
    numerics: str
    """Device, dtype, weights form and kernel: a stream may be resumed only within one numerics class."""
    block_size: int
    max_model_len: int
    protocol: int
    secret_check: str = ""
    """`signature` with the cluster secret, empty without one."""
    epoch_started_ms: Count = 0
    """When the epoch began, by the worker's clock: orders the epochs of one worker. 0: unknown."""
    oldest_protocol: int = 0
    """The oldest wire protocol that the worker still speaks; 0: only `protocol`."""
    prefill_order: Annotated[str, Literal["shared", "fifo"]] = "shared"
    """How prefills share a step: half for the oldest and half for the shortest, or first come, first served.

    An unknown order counts as "shared".
    """
    capabilities: tuple[str, ...] = ("tokens",)
    """The names of what it can do (`worker.common.capabilities`): a request goes where all that it needs is."""
    layout: str = ""
    """`RecordFormat.fingerprint`: blocks move only between workers with equal ones. Empty: it moves none."""
    tiers: tuple[TierName, ...] = ()
    """Its stores below the pool, the fastest first. A store with an unknown name counts as empty."""
    embedding_size: Count = 0
    """Numbers in an embedding that it makes of token ids; 0: it makes none."""
    chat_probes: tuple[tuple[str, str], ...] = ()
    """Digests of the engine's own ids of `worker.common.chat_probes`, by class; without those not known."""
    ends: Annotated[str, Literal["", "exact", "inexact"]] = ""
    """Set if a hit may stop before the end of a match: its model keeps only windows or states of some layers.

    "inexact": no engine has confirmed the rule. A worker with an unknown value seems to hold no block.
    """
    index_problem: str = ""
    """Why the index never has a block of it; empty if it may have blocks."""
    step_objective_s: _Seconds = 0.0
    """Not read: workers of 0.1 send it."""
    aliases: tuple[str, ...] = ()
    """Further names of its model, at its engine."""
    engine_block_size: Count = 0
    """Tokens in a block of its engine, which only takes whole ones of a prefix; 0: it takes any block of the index."""

    def hit_tokens(self, num_tokens: int) -> int:
        """Return how many tokens of a match its engine takes. With `ends`, a match is what it takes."""
        size = 0 if self.ends else self.engine_block_size
        return num_tokens // size * size if size else num_tokens


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker's answer to GET /state: the records that it publishes to the registry."""

    member: WorkerMember
    load: WorkerLoad


def signature(cluster_secret: bytes, member: WorkerMember) -> str:
    """Return `WorkerMember.secret_check`: without the cluster secret, no worker can join or impersonate another.

    It proves the identity of a worker that answers over HTTP. Entries in Redis could be copied, so they are also signed
    as a whole (see `cache.redis_index.schema`).
    """
    if not cluster_secret:
        return ""
    numbers = (member.block_size, member.max_model_len, member.protocol)
    texts = (member.worker_id, member.url, member.model, member.namespace, member.numerics, *map(str, numbers))
    fields = [text.encode() for text in texts]
    message = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
    return hmac.digest(cluster_secret, b"headstart worker member\0" + message, "sha256")[:16].hex()


def signed(cluster_secret: bytes, member: WorkerMember) -> WorkerMember:
    """Return `member` with its signature."""
    return replace(member, secret_check=signature(cluster_secret, member))


def new_epoch() -> Epoch:
    """Draw a random epoch."""
    return Epoch(secrets.token_hex(8))


def in_new_epoch(member: WorkerMember, epoch: Epoch, now_ms: int) -> WorkerMember:
    """Return `member` after its cache was cleared. Its epochs stay in order even if the clock goes back."""
    return replace(member, epoch=epoch, epoch_started_ms=max(now_ms, member.epoch_started_ms + 1))


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """One live worker in the result of a lookup."""

    member: WorkerMember
    load: WorkerLoad
    matched_blocks: int
    """Length of the prompt's prefix in the worker's pool, in blocks, up to the last end if it has ends."""
    load_age_s: float = 0.0
    tier_blocks: tuple[int, ...] = ()
    """For each of `member.tiers`, the length of the prefix in the pool and all tiers up to it."""


class PrefixIndex(Protocol):
    """The reader's side of the shared index."""

    async def lookup(
        self, hashes: Sequence[BlockHash], model: str | None = None, num_tokens: int = 0
    ) -> list[Candidate] | None:
        """Return every live worker (of `model`, if given) with its match, in one round trip.

        `num_tokens`: the whole prompt, if known. Its last token is always computed, so a hit stops before it.
        None after the deadline or any error.
        """
