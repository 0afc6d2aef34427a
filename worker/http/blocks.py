"""The routes for other workers: POST /blocks, /chains and /adopt (see `worker.contracts.exchange`)."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cache.records import WorkerLoad
from cache.types import ChainLink
from worker.common.http_protocol import ANSWER, AnswerCycle
from worker.contracts.engine import RefusedError
from worker.contracts.exchange import (
    MAX_BLOCKS,
    MAX_CHAINS,
    BlockExchange,
    BlocksWanted,
    ChainsWanted,
    Handover,
    OfferedChain,
    frame_head,
)
from worker.http.service import WorkerService
from worker.http.streams import read_body
from worker.wire import CONTENT_TYPE, Failed, pack, unpack

MAX_FETCHES: Final = 8
"""Peers that are served at a time. Others compute."""
MAX_BACKGROUND: Final = 4
"""While this many peers are served, one for which no request waits is refused."""
_NUM_THREADS: Final = 2  # peers may not take more processors from the steps
BACKGROUND_PAUSE: Final = 3.0
"""While requests run, the pause after a background record, over the time that the record took."""
STALL_S: Final = 10.0
"""Time for a peer to take a part of the answer."""
_ADOPT_S: Final = 10.0
"""Time for a hand-over. Chains that begin later are left out."""
_HEADERS: Final = [(b"content-type", CONTENT_TYPE.encode())]


def exchange_for(service: WorkerService, layout: str, epoch: str | None = None) -> BlockExchange:
    """Return the engine's exchange with a peer whose blocks have this layout. Raises RefusedError.

    `epoch`: the one that the peer asks for.
    """
    exchange = service.engine.exchange
    if exchange is None or exchange.layout != layout:
        raise RefusedError(Failed("wrong_layout", "this worker's blocks have another layout", retryable=False))
    if epoch not in (None, own := service.engine.member.epoch):
        raise RefusedError(Failed("wrong_epoch", f"epoch: this is {own}", retryable=True))
    return exchange


def pause_s(load: WorkerLoad, took_s: float) -> float:
    """Return the pause after a background record that took `took_s`: none while no request is here."""
    return BACKGROUND_PAUSE * took_s if load.num_running or load.num_waiting else 0.0


class BlocksEndpoint:
    """Pure ASGI: a refusal, or 200 and records up to the first block that is not here.

    A slow peer is waited for. One that takes nothing for STALL_S loses the answer, as one does that has left.
    """

    def __init__(self, service: WorkerService) -> None:
        self._service = service
        self._num_open = 0
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="serve-blocks")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = unpack(await read_body(Request(scope, receive)), BlocksWanted)
        exchange = exchange_for(self._service, wanted.layout, wanted.epoch)
        if self._num_open >= (MAX_BACKGROUND if wanted.background else MAX_FETCHES):
            raise RefusedError(Failed("queue_full", f"{self._num_open} peers fetch blocks already", retryable=True))
        self._num_open += 1
        try:
            await self._send_records(wanted, exchange, send, scope[ANSWER]())
        finally:
            self._num_open -= 1

    async def _send_records(
        self, wanted: BlocksWanted, exchange: BlockExchange, send: Send, answer: AnswerCycle
    ) -> None:
        loop = asyncio.get_running_loop()
        payload = exchange.new_payload()
        head = frame_head(len(payload))

        def read(link: ChainLink) -> bytes | None:
            header = exchange.read_record(link, payload)
            return None if header is None else b"".join((head, header, payload))

        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        for link in wanted.links():
            begun_s = loop.time()
            record = await loop.run_in_executor(self._threads, read, link)
            if record is None or answer.disconnected:
                break
            self._service.metrics.served_bytes.inc(len(record))
            async with asyncio.timeout(STALL_S):
                await send({"type": "http.response.body", "body": record, "more_body": True})
            if wanted.background:
                await asyncio.sleep(pause_s(self._service.engine.load, loop.time() - begun_s))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def offer_chains(service: WorkerService, request: Request) -> Response:
    """Offer the chains that this worker used last, as many as fit into a message."""
    wanted, engine = unpack(await read_body(request), ChainsWanted), service.engine
    exchange, member = exchange_for(service, wanted.layout, wanted.epoch), engine.member
    chains, num_hashes = list[OfferedChain](), 0
    for chain in await exchange.latest_chains(wanted.max_blocks):
        num_hashes += chain.num_blocks
        if num_hashes > MAX_BLOCKS or len(chains) == MAX_CHAINS:
            break
        chains.append(chain)
    return Response(pack(Handover(member.url, member.epoch, exchange.layout, tuple(chains))), media_type=CONTENT_TYPE)


async def adopt_chains(service: WorkerService, request: Request) -> Response:
    """Fetch the offered chains one after the other, the most used first, into blocks that are free."""
    handover = unpack(await read_body(request), Handover)
    exchange, engine = exchange_for(service, handover.layout), service.engine
    epoch, end_s, num_adopted = engine.member.epoch, time.monotonic() + _ADOPT_S, 0
    for chain in handover.chains:
        if engine.member.epoch != epoch or service.draining or time.monotonic() >= end_s:
            break
        if chain.num_blocks > engine.load.num_free_blocks:
            continue
        num_adopted += await exchange.adopt(handover.url, handover.epoch, chain)
    return Response(pack({"adopted_blocks": num_adopted}), media_type=CONTENT_TYPE)
