"""What workers publish and gateways read: the registry's records and the protocol of the prefix index.

The index is a hint. A stale or poisoned one costs speed, never a token: a worker trusts only its own pool.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cache.types import BlockHash, Epoch, GatewayId, WorkerId


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's load, rewritten after a step, at most every 50 ms."""

    queued_prefill_s: Mapping[GatewayId, float] = field(default_factory=dict)
    """Estimated prefill seconds of requests whose first token is not out, by the gateway that sent them."""
    assigned_prefill_s: float = 0.0
    """Prefill seconds ever assigned to this worker in this epoch: a counter, from which gateways derive rho."""
    prefill_tokens_per_s: float = 0.0
    """Measured prefill rate; 0.0 while nothing has been measured."""
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    draining: bool = False


@dataclass(frozen=True, slots=True)
class WorkerMember:
    """What a worker says of itself; constant during an epoch."""

    worker_id: WorkerId
    epoch: Epoch
    url: str
    model: str
    namespace: str
    """`Namespace.fingerprint`: a gateway refuses a worker whose namespace is not that of its model."""
    numerics: str
    """Device, dtype, weights form and kernel: a stream may be resumed only within one numerics class."""
    block_size: int
    max_model_len: int
    protocol: int
    secret_check: str = ""
    """HMAC check value of the cluster secret, empty without one."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What a worker answers to GET /state."""

    member: WorkerMember
    load: WorkerLoad


def secret_check(cluster_secret: bytes) -> str:
    """For `WorkerMember.secret_check`: tells whether two parts know the same cluster secret, and nothing else of it."""
    return hmac.digest(cluster_secret, b"headstart-secret-check", "sha256")[:8].hex() if cluster_secret else ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One live worker, as one lookup saw it."""

    member: WorkerMember
    load: WorkerLoad
    matched_blocks: int
    """Length of the prompt's prefix that the worker's published set holds, in blocks."""
    load_age_s: float = 0.0


class PrefixIndex(Protocol):
    """Reader's side of the shared index."""

    async def lookup(self, hashes: Sequence[BlockHash], model: str | None = None) -> list[Candidate] | None:
        """Every live worker (of `model`, if given) and the length of its match; None past the deadline or on any error.

        One round trip.
        """
