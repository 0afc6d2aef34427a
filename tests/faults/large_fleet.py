"""A gateway process in front of many scripted workers, which answer on every route, and the process's memory."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from cache.records import WorkerLoad, WorkerMember
from cache.redis_index import schema
from server.router.short_list import SCORE_ALL
from tests.e2e.serving import free_ports
from tests.faults.part import Gateway
from tests.redis_server import RedisServer, newest_redis
from tests.server.api.engine_worker import APIS, EngineWorker
from tests.server.api.test_embeddings import embeds
from tests.server.scripted_worker import ScriptedWorker, listening
from tests.waiting import HANG_S
from worker.common.capabilities import TOKENS
from worker.wire import (
    POOLING_PATHS,
    End,
    EngineText,
    Finished,
    Frame,
    GenerateRequest,
    Rendered,
    Started,
    TokenizerBundle,
    pack,
)

KEYS: Final = schema.Keys("headstart", 0)
FAR_MS: Final = 1 << 50
LARGE: Final = SCORE_ALL + 4
"""Workers, so many that the router keeps a short list."""
RANKS: Final = b'{"id": "e", "model": "e", "results": [], "usage": {"prompt_tokens": 9, "total_tokens": 9}}'
RENDERED: Final = pack(Rendered((tuple(range(10, 50)),), (5,)))
_PEAK: Final = re.compile(r"VmHWM:\s+(\d+) kB")


@dataclass(eq=False)
class AnyWorker(EngineWorker):
    """Writes texts as an engine does, and gives token ids where the gateway writes the text; or embeds and ranks."""

    text: str = "engine"
    """The writer of the text; pooling: the model has none."""

    def member(self) -> WorkerMember:
        names = {"gateway": (TOKENS,), "engine": APIS, "pooling": POOLING_PATHS}
        return replace(super().member(), capabilities=names[self.text])

    async def _render(self, http: Request) -> Response:
        await http.body()
        return Response(RENDERED)

    async def answer(self, request: GenerateRequest) -> AsyncIterator[Frame]:
        self.received.clear()
        async for frame in self._frames(request):
            yield frame

    def _frames(self, request: GenerateRequest) -> AsyncIterator[Frame]:
        if request.call is None:
            return embeds(request) if request.embed is not None else ScriptedWorker.answer(self, request)
        return _ranks() if request.call.path in POOLING_PATHS else EngineWorker.answer(self, request)


async def _ranks() -> AsyncIterator[Frame]:
    yield Started(0)
    yield EngineText(RANKS)
    yield Finished(0, "stop")
    yield End(0.0, 0.0, 0.0)


@asynccontextmanager
async def fleet(
    folder: Path, bundle: TokenizerBundle, num_workers: int, *options: str, text: str = "engine"
) -> AsyncIterator[Gateway]:
    """Run a gateway with these options, once it has all workers."""
    port, ops_port = free_ports(2)
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(RedisServer(folder, newest_redis()))
        for number in range(num_workers):
            worker = AnyWorker(bundle, f"w{number}", reply=[5], text=text)
            worker.url = await stack.enter_async_context(listening(worker.app()))
            _register(redis, worker.member())
        gateway = Gateway("g0", port, ops_port, folder / "g0.log", ["--redis", redis.url, *options])
        stack.callback(gateway.stop)
        gateway.start()
        async with asyncio.timeout(HANG_S):
            while await asyncio.to_thread(gateway.num_ready) < num_workers:
                assert gateway.poll() is None, gateway.tail()
        yield gateway


def _register(redis: RedisServer, member: WorkerMember) -> None:
    numbers: Any = {"set_version": 0, "batch": 1, "deadline_ms": FAR_MS, "written_ms": 1, "num_entries": 0}
    load = WorkerLoad(prefill_tokens_per_s=10_000.0)
    redis.command("HSET", KEYS.members, member.worker_id, schema.encode_member(member))
    redis.command("HSET", KEYS.states, member.worker_id, schema.encode_state(member, load, **numbers))
    redis.command("SET", KEYS.version, member.worker_id)


def forget_peak(gateway: Gateway) -> None:
    Path(f"/proc/{gateway.pid}/clear_refs").write_text("5")


def peak_bytes(gateway: Gateway) -> int:
    """Return the most memory that the process had at a time since its start, or since `forget_peak`."""
    peak = _PEAK.search(Path(f"/proc/{gateway.pid}/status").read_text())
    assert peak is not None
    return int(peak[1]) << 10
