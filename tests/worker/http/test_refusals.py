"""Nothing of a refused request outlives its answer at a worker: reference counts free its body."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import aiohttp
import pytest
import torch
from msgspec.structs import replace

from tests.worker.live_worker import LiveWorker, live_worker
from tests.worker.scheduler.arithmetic_runner import ArithmeticRunner
from tests.worker.scheduler.engine import generate
from worker.kernels.device import DeviceStream
from worker.wire import pack_request

PRODUCT = str(Path(__file__).parents[3] / "worker")
LARGE = b"\xc1" * 300_000
REFUSED = {
    "garbage": ("/generate", LARGE),
    "too long": ("/generate", pack_request(replace(generate(range(4), 2), prompt_ids=[1] * 100_000))),
    "wrong epoch": ("/generate", pack_request(replace(generate(range(4), 2), epoch="another"))),
    "abort": ("/abort", LARGE),
    "blocks": ("/blocks", LARGE),
    "adopt": ("/adopt", LARGE),
    "unknown": ("/unknown", LARGE),
    "drain by GET": ("/drain", b""),
}


@contextmanager
def no_collections() -> Iterator[None]:
    """Keep what only the collector would free in `gc.garbage`."""
    gc.collect()
    gc.freeze()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
    finally:
        gc.set_debug(0)
        gc.unfreeze()
        gc.enable()
        gc.garbage.clear()


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
        with no_collections():
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
        with no_collections():
            for _ in range(3):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % num_bytes + after)
                await writer.drain()
                await asyncio.sleep(0.02)
                writer.transport.abort()
                await worker.until(lambda: worker.service.num_open == 0)
                await asyncio.sleep(0.02)
            assert cyclic_frames() == set()


async def _ask(worker: LiveWorker, path: str, body: bytes) -> None:
    async with aiohttp.ClientSession() as session, session.post(worker.url + path, data=body) as response:
        await response.read()
    await worker.until(lambda: worker.service.num_open == 0)
    await asyncio.sleep(0.01)
