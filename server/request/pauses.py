"""The pauses of agents: an answer that calls tools is followed by a pause, and the next request extends its prompt.

    answer with calls --> how long do these tools of this tenant take? --> POST /keep to the worker (see `worker.wire`)
    next request      --> it finds the earlier prompt in its own        --> one more pause is known

Everything here is a hint: a gateway that has seen nothing of a tool assumes `DEFAULT_PAUSE_S`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from cache.hashing import hash_chain
from cache.types import BlockHash
from server.request.request import Generation
from server.router.types import Key, short_key
from server.workers.client import WorkerClient
from server.workers.connection import WorkerLost
from worker.wire import Keep

log = logging.getLogger(__name__)

MIN_PAUSE_S: Final = 1.0
"""A shorter pause ends before a pool is full of other blocks."""
MAX_PAUSE_S: Final = 3600.0
DEFAULT_PAUSE_S: Final = 300.0
QUANTILE: Final = 0.99
SLACK: Final = 4.0
"""A chain is kept for this many times the quantile: times have long tails, and old chains make room first."""
MAX_TENANTS: Final = 256
MAX_TOOLS: Final = 32
"""Tools of a tenant that have times of their own; the others share `OTHER`."""
OTHER: Final = Key("")
MAX_PENDING: Final = 10_000
_FIRST_S: Final = 0.25
_PER_OCTAVE: Final = 2
_NUM_BUCKETS: Final = 1 + math.ceil(_PER_OCTAVE * math.log2(MAX_PAUSE_S / _FIRST_S))
_DECAY: Final = 0.998
_MIN_WEIGHT: Final = 5.0
"""Pauses that a quantile needs: with fewer, those of all tools of the tenant count."""


class PauseHistogram:
    """The last five hundred pauses or so, in buckets of half an octave."""

    __slots__ = ("_counts", "weight")

    def __init__(self) -> None:
        self._counts = [0.0] * _NUM_BUCKETS
        self.weight = 0.0

    def add(self, pause_s: float) -> None:
        self._counts = [_DECAY * count for count in self._counts]
        bucket = math.ceil(_PER_OCTAVE * math.log2(max(pause_s, _FIRST_S) / _FIRST_S))
        self._counts[min(bucket, _NUM_BUCKETS - 1)] += 1.0
        self.weight = _DECAY * self.weight + 1.0

    def quantile(self, share: float) -> float:
        """Return the upper end of the bucket where this share of the pauses ends."""
        left = share * self.weight
        for bucket, count in enumerate(self._counts):
            left -= count
            if left <= 1e-9:
                return min(MAX_PAUSE_S, _FIRST_S * math.pow(2.0, bucket / _PER_OCTAVE))
        return MAX_PAUSE_S


class PauseTimes:
    """How long tenants' tools take, in bounded memory: the tenants of late, and the tools of each that it used last."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, OrderedDict[Key, PauseHistogram]] = OrderedDict()

    def add(self, tenant: str, tools: Sequence[Key], pause_s: float) -> None:
        """Count a pause of tools that ran at the same time: the slowest took most of it, so it counts for each."""
        histograms = self._tenants.setdefault(tenant, OrderedDict({OTHER: PauseHistogram()}))
        self._tenants.move_to_end(tenant)
        for tool in {OTHER, *tools}:
            histograms.setdefault(tool, PauseHistogram()).add(pause_s)
            histograms.move_to_end(tool)
        histograms.move_to_end(OTHER)
        while len(histograms) > MAX_TOOLS + 1:
            histograms.popitem(last=False)
        while len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)

    def expected_s(self, tenant: str, tools: Sequence[Key]) -> float:
        """Return the time within which nearly all pauses of these tools end."""
        histograms: Mapping[Key, PauseHistogram] = self._tenants.get(tenant, {})
        return max((self._of_tool(histograms.get(tool), histograms.get(OTHER)) for tool in tools), default=0.0)

    def _of_tool(self, *histograms: PauseHistogram | None) -> float:
        for histogram in histograms:
            if histogram is not None and histogram.weight >= _MIN_WEIGHT:
                return min(MAX_PAUSE_S, SLACK * histogram.quantile(QUANTILE))
        return DEFAULT_PAUSE_S


class _Pending(NamedTuple):
    tenant: str
    tools: Sequence[Key]
    begun_s: float


class Pauses:
    """Asks workers to keep chains over a pause, and learns how long pauses take."""

    def __init__(self, client: WorkerClient, now_s: Callable[[], float] = time.monotonic) -> None:
        self.times = PauseTimes()
        self._client = client
        self._now_s = now_s
        self._pending: OrderedDict[BlockHash, _Pending] = OrderedDict()
        """Pauses that have begun, by the last block of the prompt."""
        self._tasks: set[asyncio.Task[None]] = set()

    def ended(self, hashes: Sequence[BlockHash]) -> None:
        """Learn from a request that brings results of tools: its prompt extends that of an answer which called them."""
        tip = next((block_hash for block_hash in reversed(hashes) if block_hash in self._pending), None)
        if tip is not None:
            pending = self._pending.pop(tip)
            self.times.add(pending.tenant, pending.tools, self._now_s() - pending.begun_s)

    def begin(self, generation: Generation, called: Sequence[str]) -> None:
        """Keep the chain of a finished answer that calls tools, or whose request asks for it."""
        spec, worker, hashes = generation.spec, generation.last_worker, generation.route.hashes
        if not hashes:
            return
        keep_s = min(MAX_PAUSE_S, spec.retention_s)
        if tools := tuple(map(short_key, called[:MAX_TOOLS])):
            keep_s = max(keep_s, self.times.expected_s(spec.tenant, tools))
            self._pending[hashes[-1]] = _Pending(spec.tenant, tools, self._now_s())
            while len(self._pending) > MAX_PENDING:
                self._pending.popitem(last=False)
        if worker is None or not worker.keeps_chains or keep_s < MIN_PAUSE_S:
            return
        answer: list[BlockHash] = []
        if len(generation.choices) == 1 and not spec.media:
            size = worker.block_size
            token_ids = [*spec.prompt_ids[len(hashes) * size :], *generation.choices[0].output_ids]
            answer = hash_chain(hashes[-1], token_ids, size)
        keep = Keep(worker.epoch, b"".join([*hashes, *answer]), len(hashes), keep_s, spec.tenant)
        task = asyncio.create_task(self._send(worker.url, keep))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, url: str, keep: Keep) -> None:
        try:
            await self._client.keep(url, keep)
        except WorkerLost as error:
            log.debug("%s keeps no chain: %s", url, error)
