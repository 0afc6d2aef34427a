"""Nothing of a refused request outlives its answer at a worker: reference counts free its body."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import aiohttp
import pytest
import torch
from msgspec.structs import replace

from tests.refusals import frozen, no_collections, sent
from tests.waiting import HANG_S, until
from tests.worker.adapter.refused_bodies import ENGINE_OPTIONS, adapter_cases
from tests.worker.adapter.rig import BLOCK, BUNDLE, MEMBER, fake_engine, write_tokenizer
from tests.worker.live_worker import LiveWorker, live_worker, serve
from tests.worker.scheduler.arithmetic_runner import ArithmeticRunner
from tests.worker.scheduler.engine import generate
from worker.adapter.blocks import EngineBlocks
from worker.adapter.engine import AdapterEngine
from worker.adapter.health import EngineHealth, facts_of
from worker.adapter.vllm import VllmApi
from worker.contracts.metrics import WorkerMetrics
from worker.http.service import WorkerService
from worker.kernels.device import DeviceStream
from worker.wire import pack_request

pytestmark = pytest.mark.e2e

PRODUCT = str(Path(__file__).parents[3] / "worker")
LARGE = b"\xc1" * 300_000
REFUSED = {
    "garbage": ("/generate", LARGE),
    "too long": ("/generate", pack_request(replace(generate(range(4), 2), prompt_ids=[1] * 100_000))),
    "wrong epoch": ("/generate", pack_request(replace(generate(range(4), 2), epoch="another"))),
    "abort": ("/abort", LARGE),
    "blocks": ("/blocks", LARGE),
    "chains": ("/chains", LARGE),
    "adopt": ("/adopt", LARGE),
    "unknown": ("/unknown", LARGE),
    "drain by GET": ("/drain", b""),
}


def cyclic_frames() -> set[str]:
    """Name the product's frames that only the collector frees."""
    gc.collect()
    frames = [each.f_code for each in gc.garbage if isinstance(each, FrameType)]
    gc.garbage.clear()
    return {code.co_qualname for code in frames if code.co_filename.startswith(PRODUCT)}


@pytest.mark.parametrize("name", REFUSED)
async def test_refused_bodies_are_freed_with_their_answer(name: str) -> None:
    path, body = REFUSED[name]
    runner = ArithmeticRunner(129, 4, stream=DeviceStream(torch.device("cpu")))
    async with live_worker(runner, 129, 4, max_num_batched_tokens=64, max_num_seqs=16) as worker:
        await _ask(worker, path, body)
        with frozen(), no_collections():
            for _ in range(3):
                await _ask(worker, path, body)
            assert cyclic_frames() == set()


@pytest.mark.parametrize("after", [b"\xc1" * 100_000, pack_request(generate(range(4), 50))])
async def test_bodies_of_clients_that_leave_are_freed(after: bytes) -> None:
    """In the middle of a body, and of an answer."""
    runner = ArithmeticRunner(129, 4, stream=DeviceStream(torch.device("cpu")))
    async with live_worker(runner, 129, 4, max_num_batched_tokens=64, max_num_seqs=16) as worker:
        host, _, port = worker.url.removeprefix("http://").partition(":")
        num_bytes = len(after) + (1000 if after[:1] == b"\xc1" else 0)
        with frozen(), no_collections():
            for _ in range(3):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % num_bytes + after)
                await writer.drain()
                await asyncio.sleep(0.02)
                writer.transport.abort()
                await worker.until(lambda: worker.service.num_open == 0)
                await asyncio.sleep(0.02)
            assert cyclic_frames() == set()


@asynccontextmanager
async def adapter(folder: Path) -> AsyncIterator[tuple[WorkerService, int]]:
    """Run the adapter of a fake engine on this event loop. Yield it and its port."""
    async with fake_engine(write_tokenizer(folder), *ENGINE_OPTIONS, events=False) as (_, url):
        api, metrics = VllmApi(url), WorkerMetrics()
        await api.version()
        service, blocks = WorkerService(metrics), EngineBlocks(BLOCK, max_names=4096)
        health = EngineHealth(facts_of(await api.load(), await api.model()), hang_s=HANG_S, probe_s=0.0)
        engine = AdapterEngine(api, blocks, None, BUNDLE, MEMBER, health, metrics, service.sinks())
        await engine.catch_up()
        service.start(engine)
        try:
            async with serve(service) as own_url:
                yield service, int(own_url.rpartition(":")[2])
        finally:
            await engine.close()


async def test_an_adapter_frees_the_bodies_with_their_answers(tmp_path: Path) -> None:
    wrong = {}
    async with adapter(tmp_path) as (service, port):
        for case in adapter_cases():
            body = partial(case.body, 300_000)
            async with sent(case, port, body):
                await until(lambda: service.num_open == 0)
            with frozen(), no_collections():
                async with sent(case, port, body) as status:
                    await until(lambda: service.num_open == 0)
                    await asyncio.sleep(0.01)
                    if (frames := cyclic_frames()) or status not in (case.statuses or (0,)):
                        wrong[str(case)] = status, frames
    assert wrong == {}


async def _ask(worker: LiveWorker, path: str, body: bytes) -> None:
    async with aiohttp.ClientSession() as session, session.post(worker.url + path, data=body) as response:
        await response.read()
    await worker.until(lambda: worker.service.num_open == 0)
    await asyncio.sleep(0.01)
