"""Both sides of the index in one process: real publishers, and a gateway's index, fleet, router and models."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Final

import redis
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from cache.events import BlockEvent, Removed, Stored
from cache.hashing import index_entry
from cache.records import Candidate, WorkerLoad, WorkerMember, signed
from cache.redis_index import ReaderSettings, RedisDownError, RedisIndex, WriterSettings, schema
from cache.redis_index.schema import Keys, Signer
from cache.types import BlockHash, Epoch, GatewayId
from server.cli.index import shown
from server.config import GatewayConfig
from server.metrics import GatewayMetrics
from server.models.registry import Models
from server.ops.overview import index_row
from server.router.router import Router
from server.router.types import NoWorkerError, RouteRequest
from server.workers.client import WorkerClient
from server.workers.fleet import FetchState, Fleet
from server.workers.networks import WorkerNetworks
from tests.fuzz.harness import within
from tests.members import make_member
from tests.server.conftest import bundle_of
from tests.waiting import HANG_S
from worker.publishing.inbox import PublisherInbox
from worker.publishing.publisher import Publisher, PublisherSettings
from worker.wire import TokenizerBundle

MODEL: Final = "m"
SECRET: Final = b"the cluster's secret of the fuzzer"
NUM_BLOCKS: Final = 24
"""Held by each worker at the start."""
PUBLISHER: Final = PublisherSettings(
    interval_s=0.001,
    heartbeat_s=1.0,
    retry_s=0.01,
    max_retry_s=0.1,
    tidy_s=0.0,
    prune_s=0.0,
    rewrite_s=0.02,
)
BACK_S: Final = HANG_S
STOP_S: Final = HANG_S
NETWORKS: Final = WorkerNetworks(("127.0.0.0/8", "::1/128"))


def tiny_bundle() -> TokenizerBundle:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=260, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["one two three"], trainer)
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "eos_token_ids": (1,)}
    return bundle_of(tokenizer, model=MODEL, chat_template=None, max_model_len=4096, **tokens)


BUNDLE: Final = tiny_bundle()


def member(name: str, url: str, **changes: Any) -> WorkerMember:
    """Return the unsigned member of a worker that serves MODEL."""
    fields = {"url": url, "model": MODEL, "namespace": BUNDLE.namespace.fingerprint}
    epoch = changes.pop("epoch", f"e-{os.urandom(6).hex()}")
    return make_member(name, epoch, **{**fields, **changes})


def record_of(own: WorkerMember, prefix: str, secret: bytes) -> bytes:
    """Return what the worker itself would write into the registry."""
    return Signer(secret, prefix, 0).sign_member(own.worker_id, schema.encode_member(own))


class Worker:
    """The publishing side of one worker, and what its pool holds, and each of its tiers."""

    def __init__(
        self, url: str, prefix: str, secret: bytes, own: WorkerMember, timeout_s: float = 1.0, lease_s: float = 6.0
    ) -> None:
        self.member = signed(secret, own)
        self.name: str = own.worker_id
        self.secret = secret
        self.held: list[BlockHash] = []
        self._url = url
        self._writer_settings = WriterSettings(
            prefix=prefix, chunk=7, chunks_in_flight=2, timeout_s=timeout_s, lease_s=lease_s, cluster_secret=secret
        )
        self.counts: Counter[str] = Counter()
        self.publisher = self._publisher()

    def _publisher(self) -> Publisher:
        return Publisher(
            self._url,
            self.member,
            PublisherInbox(),
            settings=PUBLISHER,
            writer_settings=self._writer_settings,
            count=lambda event: self.counts.update([event]),
        )

    def begin(self, hashes: Sequence[BlockHash]) -> None:
        """A new life, with these blocks: its publisher is to be run."""
        self.member = signed(self.secret, dataclasses.replace(self.member, epoch=Epoch(f"e-{os.urandom(6).hex()}")))
        self.publisher = self._publisher()
        self.held = []
        self.change(hashes)

    def change(self, stored: Sequence[BlockHash] = (), num_removed: int = 0) -> None:
        """The engine has stored blocks at the end of the chain, or dropped some from there."""
        events: list[BlockEvent] = [Stored(block) for block in stored]
        self.held += stored
        for _ in range(num_removed):
            events.append(Removed(self.held.pop()))
        for tier in self.member.tiers:
            self.publisher.inbox.offer_tier(tier, events)
        self.publisher.inbox.offer(events, WorkerLoad({GatewayId("g"): 0.1}, 1.0, 1000.0, 1, 0, 90, 100))

    def stands(self, store: redis.Redis) -> bool:
        """The sets in Redis are what the worker holds."""
        keys = self.publisher._writer._set_keys
        held = {index_entry(block) for block in self.held}
        return bool(keys) and all(store.smembers(key) == held for key in keys)


class Gateway:
    """The reading side, as `server.gateway` wires it."""

    def __init__(
        self,
        url: str,
        prefix: str,
        secret: bytes,
        fetch: FetchState,
        client: WorkerClient,
        static: Sequence[str],
        deadline_s: float = 0.25,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.signed = bool(secret)
        reader_settings = ReaderSettings(
            prefix=prefix, refresh_interval_s=0.0, deadline_s=deadline_s, breaker_probe_s=0.02, cluster_secret=secret
        )
        self.index = RedisIndex(url, reader_settings, count=self._count)
        self.executor = ThreadPoolExecutor(1)
        self.models = Models(client, self.executor, GatewayConfig(workers=("http://127.0.0.1:9",)))
        self.fleet = Fleet(
            self.index,
            fetch,
            targets=static,
            cluster_secret=secret,
            networks=NETWORKS,
            forget_s=0.5,
        )
        self.router = Router(self.index, self.fleet, GatewayId("g"), GatewayMetrics(), rng=random.Random(1))

    def _count(self, event: str) -> None:
        self.counts[event] += 1

    async def lookup(
        self, hashes: Sequence[BlockHash], model: str | None = MODEL, num_tokens: int = 0
    ) -> list[Candidate] | None:
        """Checked: a list of sound candidates, or None, which is counted."""
        before = self.counts.total()
        found = await self.index.lookup(hashes, model)
        if found is None:
            assert self.counts.total() > before, "a lookup without an answer was not counted"
            return None
        assert isinstance(found, list), f"a lookup gave {found!r:.100}"
        for candidate in found:
            check_candidate(candidate, len(hashes))
        return found

    async def decide(self, hashes: Sequence[BlockHash]) -> None:
        """Place a request and take it back."""
        request = RouteRequest("r", MODEL, len(hashes) * 16 + 1, hashes)
        try:
            placement = await self.router.place(request)
        except NoWorkerError as error:
            if not self.signed and any(member.model != MODEL for member in self.index.members()):
                return  # a bit of the model's name was flipped on its way, and nothing is signed that would show it
            raise AssertionError(f"no worker: {error} {self._debug()}") from None
        assert math.isfinite(placement.promised_tokens)
        self.router.closed(placement)
        await self.router.decide(request, dry_run=True)

    def _debug(self) -> str:
        now_s = time.monotonic()
        known = {
            name: {slot: getattr(k, slot) - now_s for slot in ("seen_s", "leased_s", "answered_s", "unanswered_s")}
            for name, k in self.fleet._workers.items()
        }
        return f"{known} members {self.index.members()} counts {self.counts}"

    async def report(self) -> None:
        """Build the answers of `headstart index` and GET /index, and assert that they are valid."""
        try:
            entries = await self.index.entries()
        except RedisDownError:
            return
        answer = {"workers": [index_row(entry) for entry in entries]}
        shown("workers", answer)
        json.dumps(answer, allow_nan=False)


def check_candidate(candidate: Candidate, num_blocks: int) -> None:
    """Assert that all a router computes with has its type and is finite."""
    matched = candidate.matched_blocks
    assert type(matched) is int, f"a match of {matched!r:.80} blocks of {num_blocks}"
    assert 0 <= matched <= num_blocks, f"a match of {matched!r:.80} blocks of {num_blocks}"
    lengths = [matched, *candidate.tier_blocks]
    assert all(type(length) is int and length <= num_blocks for length in lengths), f"matches {lengths!r:.80}"
    assert lengths == sorted(lengths), f"matches {lengths!r:.80}"
    assert len(candidate.tier_blocks) in (0, len(candidate.member.tiers)), f"matches {lengths!r:.80}"
    load = candidate.load
    numbers = [candidate.load_age_s, load.assigned_prefill_s, load.prefill_tokens_per_s, load.start_interval_s]
    numbers += load.queued_prefill_s.values()
    assert all(math.isfinite(number) for number in numbers), f"a load of {load!r:.200}"


class Parts:
    """Background tasks none of which may end."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    def add(self, name: str, part: Coroutine[Any, Any, Any]) -> None:
        self._tasks[name] = asyncio.create_task(part)

    def check(self) -> None:
        """Raises what one ended with."""
        for name, task in self._tasks.items():
            if task.done():
                task.result()
                raise AssertionError(f"{name} has ended")

    async def ended(self, name: str, seconds: float) -> None:
        """It ends of itself: raises what it ended with."""
        task = self._tasks.pop(name)

        async def done() -> bool:
            return task.done()

        try:
            await within(seconds, done, lambda: f"the end of {name}")
        finally:
            task.cancel()
        task.result()

    async def stop(self) -> None:
        """Raises AssertionError when one goes on although it was cancelled."""
        for task in self._tasks.values():
            task.cancel()
        if not self._tasks:
            return
        _, left = await asyncio.wait(self._tasks.values(), timeout=STOP_S)
        if left:
            names = [name for name, task in self._tasks.items() if task in left]
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=STOP_S)
            raise AssertionError(f"cancelled, and goes on: {names}")


@asynccontextmanager
async def worker_client() -> AsyncIterator[WorkerClient]:
    client = WorkerClient(networks=NETWORKS)
    try:
        yield client
    finally:
        client.close()


def chain(rng: random.Random, length: int) -> list[BlockHash]:
    return [BlockHash(rng.randbytes(16)) for _ in range(length)]


def keys_of(prefix: str) -> Keys:
    return Keys(prefix, 0)
