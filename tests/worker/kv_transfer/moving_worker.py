"""A worker over HTTP whose blocks move, and the blocks of one prompt that it has computed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cache.allocators.hash import HashAllocator
from cache.hashing import hash_chain
from cache.stores.base import BlockStore
from cache.types import ChainLink
from tests.worker.kv_transfer.moving_engine import BLOCK_SIZE, RECORD, SECRET, TokenCopier
from tests.worker.live_worker import LiveWorker, live_worker
from tests.worker.scheduler.arithmetic_runner import ArithmeticRunner
from tests.worker.scheduler.engine import ROOT, generate
from tests.worker_tokens import headers_at
from worker.common.proof import gateway_token
from worker.contracts.metrics import WorkerMetrics
from worker.contracts.rates import PrefillRate
from worker.kv_transfer.peers import PeerClient
from worker.kv_transfer.pool_blocks import PoolBlocks
from worker.kv_transfer.transfers import KVTransfers

NUM_BLOCKS = 65
PROMPT = range(33)
HASHES = hash_chain(ROOT, PROMPT, BLOCK_SIZE)
LINKS = [ChainLink(each, HASHES[n - 1] if n else ROOT, n) for n, each in enumerate(HASHES)]
PAYLOADS = [b"".join(token.to_bytes(4, "little") for token in PROMPT[n * 4 : n * 4 + 4]) for n in range(len(HASHES))]
TOKEN = gateway_token(SECRET)


@asynccontextmanager
async def moving_worker(*stores: BlockStore) -> AsyncIterator[LiveWorker]:
    """A worker that has computed PROMPT."""
    runner = ArithmeticRunner(NUM_BLOCKS, BLOCK_SIZE)

    def make(allocator: HashAllocator) -> KVTransfers:
        pool = PoolBlocks(allocator, TokenCopier(runner))
        client = PeerClient(RECORD, TOKEN)
        return KVTransfers(pool, PrefillRate(10, 1.0), stores, RECORD, client, WorkerMetrics())

    async with live_worker(runner, NUM_BLOCKS, BLOCK_SIZE, make_transfers=make, token=TOKEN) as worker:
        worker.http.headers.update(await headers_at(SECRET, worker.http, worker.url))
        status, _ = await worker.generate(generate(PROMPT, 1))
        assert status == 200
        yield worker
