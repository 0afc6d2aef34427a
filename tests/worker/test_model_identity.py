"""Two checkpoints of equal name, sizes and times that differ in some bytes: no block of one serves the other."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy
import pytest

from cache.records import WorkerMember
from tests.tiny_model import write_tiny_model
from tests.waiting import until
from tests.worker.live_worker import serve
from tests.worker.scheduler.engine import generate
from tests.worker_tokens import headers_at
from worker.common.frames import FrameReader
from worker.common.proof import gateway_token
from worker.config import parse
from worker.contracts.metrics import WorkerMetrics
from worker.contracts.rates import PrefillRate
from worker.http.app import make_app
from worker.http.service import WorkerService
from worker.loading import engine as loader
from worker.loading.engine import build_engine
from worker.model.huggingface import SafetensorsCheckpoint
from worker.wire import BlockSource, End, Started, Tokens, pack_request

SECRET = "0" * 64
PROMPT = [5 + 7 * i % 4000 for i in range(100)]
NUM_BLOCKS = len(PROMPT) // 16
BLOCK_BYTES = 2 * 2 * 16 * 32 * 4
"""Keys and values, two layers, 16 tokens, two heads of 16, float32."""
_TENSOR = "model.layers.0.self_attn.v_proj.weight"


def change_a_matrix(file: Path) -> None:
    """Overwrite one matrix in place, and put the file's times back."""
    before = file.stat()
    with file.open("r+b") as weights:
        header_bytes = int.from_bytes(weights.read(8), "little")
        tensor = json.loads(weights.read(header_bytes))[_TENSOR]
        begin, end = tensor["data_offsets"]
        assert tensor["dtype"] == "F32"
        weights.seek(8 + header_bytes + begin)
        weights.write(numpy.random.default_rng(0).standard_normal((end - begin) // 4, numpy.float32).tobytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("original") / "tiny")


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "copy" / "tiny")


@pytest.fixture
def twin(original: Path, tmp_path: Path) -> Path:
    folder = shutil.copytree(original, tmp_path / "twin" / "tiny")
    change_a_matrix(folder / "model.safetensors")
    return folder


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose prefill is slow: to load a block is always worth it."""
    monkeypatch.setenv("HEADSTART_CLUSTER_SECRET", SECRET)
    monkeypatch.setattr(loader, "warm_up", lambda runner, num_tokens, block_size: PrefillRate(1, 10.0))


@dataclass
class Answer:
    token_ids: list[int]
    started: Started


@dataclass
class Worker:
    url: str
    member: WorkerMember
    metrics: WorkerMetrics
    http: aiohttp.ClientSession

    async def ask(self, source: BlockSource | None = None) -> Answer:
        wire = generate(PROMPT, 6, temperature=0.0, source=source)
        token_ids: list[int] = []
        started, reader = None, FrameReader()
        async with self.http.post(self.url + "/generate", data=pack_request(wire)) as response:
            assert response.status == 200, await response.text()
            async for data in response.content.iter_any():
                for frame in reader.feed(data):
                    match frame:
                        case Started():
                            started = frame
                        case Tokens(_, ids):
                            token_ids += ids
        assert isinstance(frame, End)
        assert started is not None
        return Answer(token_ids, started)

    def as_source(self) -> BlockSource:
        return BlockSource(self.url, self.member.epoch, NUM_BLOCKS)

    async def saved(self) -> None:
        name, labels = "headstart_worker_kv_saved_bytes_total", {"tier": "disk"}
        await until(lambda: (self.metrics.registry.get_sample_value(name, labels) or 0) >= NUM_BLOCKS * BLOCK_BYTES)


@asynccontextmanager
async def worker(model: Path, *options: str) -> AsyncIterator[Worker]:
    config = parse(["--model", str(model), "--num-blocks", "64", "--dtype", "float32", "--threads", "1", *options])
    metrics = WorkerMetrics()
    service = WorkerService(metrics)
    sinks = service.sinks()
    engine = await asyncio.to_thread(
        build_engine, config, "http://127.0.0.1:1", "w", metrics, lambda text: None, sinks=sinks
    )
    service.start(engine)
    try:
        token = gateway_token(SECRET.encode())
        app = make_app(service, token)
        async with serve(service, app) as url, aiohttp.ClientSession() as http:
            http.headers.update(await headers_at(SECRET.encode(), http, url))
            yield Worker(url, engine.member, metrics, http)
    finally:
        engine.stop()
        engine.grammars.close()


async def test_blocks_on_disk_serve_their_own_model_alone(
    original: Path, copy: Path, twin: Path, tmp_path: Path
) -> None:
    disk = ("--kv-disk", str(tmp_path / "kv"), "--kv-disk-size", "64M")
    async with worker(original, *disk) as first:
        want = await first.ask()
        await first.saved()
    async with worker(copy, *disk) as second:
        found = await second.ask()
        assert (found.started.fetched_tokens or {}).get("disk", 0) > 0
        assert found.token_ids == want.token_ids
    async with worker(twin) as cold:
        want_of_twin = await cold.ask()
        assert want_of_twin.token_ids != want.token_ids
    async with worker(twin, *disk) as third:
        got = await third.ask()
        assert got.started.num_cached_tokens == 0
        assert got.token_ids == want_of_twin.token_ids


async def test_blocks_of_a_peer_serve_its_own_model_alone(original: Path, copy: Path, twin: Path) -> None:
    async with worker(original) as peer:
        want = await peer.ask()
        async with worker(copy) as second:
            found = await second.ask(peer.as_source())
            assert (found.started.fetched_tokens or {}).get("peer", 0) > 0
            assert found.token_ids == want.token_ids
        async with worker(twin) as third:
            assert third.member.layout != peer.member.layout
            got = await third.ask(peer.as_source())
            assert got.started.num_cached_tokens == 0
            assert got.token_ids != want.token_ids


async def test_a_stream_resumes_at_its_own_model_alone(original: Path, copy: Path, twin: Path) -> None:
    """A gateway takes workers of one namespace for a model, and every hash of a block begins with it."""
    async with worker(original) as first, worker(copy) as second, worker(twin) as third:
        assert first.member.namespace == second.member.namespace != third.member.namespace


def test_a_commit_whose_files_were_changed_here_shares_no_blocks(original: Path, twin: Path) -> None:
    """The namespace of a Hugging Face id holds its commit; the layout of blocks holds the bytes."""
    first, second = (SafetensorsCheckpoint(folder, "org/tiny", "0123abcd") for folder in (original, twin))
    assert first.revision == second.revision
    assert first.files.digest != second.files.digest
