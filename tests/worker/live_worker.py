"""A worker's HTTP side on a real uvicorn over loopback, around any runner, and a client that speaks the wire."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import aiohttp
import uvicorn
from starlette.types import ASGIApp

from cache.allocators import make_allocator
from cache.allocators.base import Allocator
from tests.members import make_member
from tests.waiting import until
from tests.worker.scheduler.engine import BUNDLE, Answer
from worker.common.frames import FrameReader
from worker.common.http_protocol import StrictProtocol
from worker.contracts.metrics import WorkerMetrics
from worker.contracts.rates import PrefillRate
from worker.contracts.step import Runner
from worker.engine.engine import EngineCore
from worker.http.app import make_app
from worker.http.service import WorkerService
from worker.http.streams import QueueLimits
from worker.kv_transfer.transfers import KVTransfers
from worker.scheduler.budget import BatchLimits
from worker.scheduler.scheduler import Scheduler
from worker.wire import GenerateRequest, TokenizerBundle, pack_request


@dataclass
class LiveWorker:
    url: str
    service: WorkerService
    scheduler: Scheduler
    engine: EngineCore
    http: aiohttp.ClientSession

    async def settled(self) -> None:
        """Everything that reached the engine so far has been done."""
        await asyncio.wrap_future(self.engine.mailbox.call(lambda: None))

    async def generate(self, request: GenerateRequest) -> tuple[int, Answer]:
        """The status and all frames."""
        answer = Answer()
        async with self.http.post(self.url + "/generate", data=pack_request(request)) as response:
            reader = FrameReader()
            async for data in response.content.iter_any():
                for frame in reader.feed(data):
                    answer.add(frame)
            return response.status, answer

    async def until(self, condition) -> None:
        await until(condition)


@contextlib.asynccontextmanager
async def serve(
    service: WorkerService, app: ASGIApp | None = None, http: type[asyncio.Protocol] = StrictProtocol
) -> AsyncIterator[str]:
    """The service's application on a free port; its URL."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(1024)
    config = uvicorn.Config(app or make_app(service), http=http, lifespan="off", log_config=None, access_log=False)
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def live_worker(
    runner: Runner,
    num_blocks: int,
    block_size: int,
    *,
    bundle: TokenizerBundle = BUNDLE,
    queue_limits: QueueLimits | None = None,
    make_transfers: Callable[[Allocator], KVTransfers | None] = lambda allocator: None,
    token: str = "",
    **limits,
) -> AsyncIterator[LiveWorker]:
    metrics = WorkerMetrics()
    service = WorkerService(metrics, queue_limits=queue_limits)
    allocator = make_allocator("hash", num_blocks, block_size)
    batch_limits = BatchLimits(**limits)
    member = make_member(epoch="e1", block_size=block_size, max_model_len=bundle.max_model_len)
    transfers = make_transfers(allocator)
    fetcher = None if transfers is None else transfers.fetches
    scheduler = Scheduler(allocator, batch_limits, bundle.eos_token_ids, fetcher=fetcher)
    engine = EngineCore(
        scheduler,
        runner,
        PrefillRate(1000, 1.0),
        bundle,
        member,
        metrics,
        max_step_s=60.0,
        transfers=transfers,
        sinks=service.sinks(),
    )
    service.start(engine)
    try:
        app = make_app(service, token)
        connector = aiohttp.TCPConnector(limit=0)
        async with serve(service, app) as url, aiohttp.ClientSession(connector=connector) as http:
            yield LiveWorker(url, service, scheduler, engine, http)
    finally:
        engine.stop()
        engine.grammars.close()
