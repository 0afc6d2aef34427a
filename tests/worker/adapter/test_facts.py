"""An engine process that comes back as another one: the worker ends, and no stream has tokens of both."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from cache.events import BlockEvent
from cache.records import WorkerLoad
from tests.e2e.serving import free_ports
from tests.faults.part import ROOT
from tests.waiting import HANG_S, until, wait_until
from tests.worker.adapter.rig import BLOCK, Rig, ScriptedApi, fake_engine, make_request, token_ids
from worker.adapter import watch
from worker.adapter.api import EngineLoad, EngineLostError, EngineRefusedError
from worker.adapter.connect import connect
from worker.adapter.facts import FactsReader
from worker.config import WorkerConfig
from worker.contracts.engine import EngineDeadError
from worker.contracts.metrics import WorkerMetrics
from worker.wire import End, EngineCall, Failed, Frame, Rendered, Tokens

SLOW = ("--token-s", "0.02")
CHANGES = {
    "model": ((), ("--model", "other"), "model: .*'tiny'.* -> .*'other'"),
    "dtype": (("--dev-mode",), ("--dev-mode", "--dtype", "bfloat16"), "float32/dense -> bfloat16/dense"),
    "quantisation": (("--dev-mode",), ("--dev-mode", "--quantization", "fp8"), "float32/dense -> float32/fp8"),
    "an unsaid dtype": ((), ("--dtype", "bfloat16"), "answer: "),
    "tokenizer": ((), ("--tokenizer-shift", "1"), "tokens: "),
    "weights": ((), ("--weights", "other"), "answer: "),
    "context": ((), ("--max-model-len", "2048"), "model: .*4096.* -> .*2048"),
    "alias": ((), ("--alias", "tiny-2"), "model: .*tiny-2"),
    "version": ((), ("--version", "0.33.0"), "version: 0.32.0 -> 0.33.0"),
    "blocks": ((), ("--block-size", "16"), "block_size: 32 -> 16"),
}
"""By name: options before, options after, and a part of the log line."""
OFTEN = {"model", "dtype", "quantisation", "tokenizer"}


@dataclass
class EngineProcess:
    """A fake engine, and others in its place, one at a time."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *options: str) -> None:
        sockets = ("--events", f"ipc://{self.folder}/events", "--replay", f"ipc://{self.folder}/replay")
        command = [sys.executable, "-m", "tests.fake_engine", str(self.folder), "--port", str(self.port), *sockets]
        self.process = subprocess.Popen([*command, *options], cwd=ROOT)
        wait_until(self._answers, what="a fake engine")

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", timeout=HANG_S).status_code == 200
        return False

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture
def engine(engine_folder: Path) -> Iterator[EngineProcess]:
    engine = EngineProcess(engine_folder, free_ports(1)[0])
    yield engine
    engine.kill()


class ConnectedRig(Rig):
    """A rig over what `connect` makes, with the deaths that it reports."""

    def __init__(self) -> None:
        super().__init__(ScriptedApi())
        self.loads: list[WorkerLoad] = []

    def offer(self, events: Sequence[BlockEvent], load: WorkerLoad) -> None:
        super().offer(events, load)
        self.loads.append(load)

    async def connect(self, config: WorkerConfig) -> None:
        self.engine = await connect(config, "http://w", "w", WorkerMetrics(), lambda line: None, self.sinks)

    def is_ready(self) -> bool:
        return self.engine.refusal(make_request()) is None and not self.load.draining


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[ConnectedRig]:
    config = WorkerConfig(engine="vllm", engine_url=url, block_size=BLOCK)
    rig = ConnectedRig()
    await rig.connect(config)
    rig.engine.start()
    supervising = asyncio.create_task(rig.engine.supervise())
    try:
        await until(lambda: rig.load.num_blocks)
        yield rig
    finally:
        supervising.cancel()
        await asyncio.gather(supervising, return_exceptions=True)
        await rig.engine.close()


def has_tokens(frames: Sequence[Frame]) -> bool:
    return any(isinstance(frame, Tokens) for frame in frames)


def is_lost(frames: Sequence[Frame]) -> bool:
    return isinstance(frames[-1], Failed) and (frames[-1].code, frames[-1].retryable) == ("worker_lost", True)


@pytest.mark.parametrize(
    "change", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.deep) for name in CHANGES]
)
async def test_another_engine_ends_the_worker(
    engine: EngineProcess, change: str, brisk: None, caplog: pytest.LogCaptureFixture
) -> None:
    before, after, said = CHANGES[change]
    engine.start(*SLOW, *before)
    async with connected(engine.url) as rig:
        whole = token_ids(await rig.answer(make_request(max_tokens=60, ignore_eos=True)))
        keys = [rig.submit(make_request(max_tokens=1000, ignore_eos=True)) for _ in range(3)]
        keys.append(rig.submit(make_request(max_tokens=1000, ignore_eos=True, output_ids=tuple(whole[:10]))))
        await until(lambda: all(len(token_ids(rig.frames[key])) >= 3 for key in keys))
        await asyncio.to_thread(engine.kill)
        await until(lambda: all(map(rig.is_over, keys)))
        await asyncio.to_thread(engine.start, *SLOW, *after)
        await until(lambda: rig.deaths)
        assert not rig.is_ready()
        [death] = rig.deaths
        assert isinstance(death, EngineDeadError)
        assert rig.load.draining, "gateways send it nothing"
        for number, key in enumerate(keys):
            got = token_ids(rig.frames[key])[: len(whole) - 10]
            start = 10 if number == 3 else 0
            assert got == whole[start : start + len(got)]
            assert is_lost(rig.frames[key])
    [critical] = [record.message for record in caplog.records if record.levelno == logging.CRITICAL]
    assert re.search(said, critical), critical


@pytest.mark.parametrize(("change", "is_resumed"), [("an unsaid dtype", True), ("model", False)])
async def test_no_token_of_another_engine_comes_before_it_is_known(
    engine: EngineProcess, change: str, is_resumed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch sleeps: only the request's own connection shows that the engine has started again."""
    before, after, _ = CHANGES[change]
    engine.start(*before)
    monkeypatch.setattr(watch, "WATCH_S", 2 * HANG_S)
    async with connected(engine.url) as rig:
        await rig.answer(make_request())
        engine.kill()
        engine.start(*after)  # within a turn of this loop: nothing here has seen it away
        output_ids = tuple(range(1000, 1005)) if is_resumed else ()
        keys = [rig.submit(make_request(max_tokens=50, output_ids=output_ids, n=1 + i)) for i in range(3)]
        await until(lambda: all(map(rig.is_over, keys)) and rig.deaths)
        assert not any(has_tokens(rig.frames[key]) for key in keys)
        assert all(is_lost(rig.frames[key]) for key in keys)
        assert not rig.is_ready()


async def test_another_engine_between_the_facts_and_the_first_counts(engine: EngineProcess, brisk: None) -> None:
    engine.start("--dev-mode")
    config = WorkerConfig(engine="vllm", engine_url=engine.url, block_size=BLOCK)
    rig = ConnectedRig()
    await rig.connect(config)
    engine.kill()
    engine.start("--dev-mode", "--quantization", "fp8")
    rig.engine.start()
    await until(lambda: rig.deaths)
    await rig.engine.close()


async def test_the_same_engine_goes_on_in_a_new_epoch(engine: EngineProcess) -> None:
    engine.start()
    async with connected(engine.url) as rig:
        whole = await rig.answer(make_request(max_tokens=40, ignore_eos=True))
        for pause in (True, False):
            epoch = rig.engine.member.epoch
            if pause:
                await asyncio.to_thread(engine.kill)
                await until(lambda: not rig.is_ready())
            engine.kill()
            engine.start()
            await until(lambda epoch=epoch: rig.engine.member.epoch != epoch and rig.is_ready())
            again = await rig.answer(make_request(max_tokens=40, ignore_eos=True))
            assert isinstance(again[-1], End)
            assert token_ids(again) == token_ids(whole)
        assert not rig.deaths


async def test_a_list_of_other_models_is_enough(engine_folder: Path, brisk: None) -> None:
    """Without a restart that counts could show."""
    async with fake_engine(engine_folder) as (fake, url), connected(url) as rig:
        fake.args.lora = ["pirate"]
        await until(lambda: rig.engine.member.adapters == ("pirate",))
        assert rig.is_ready()
        fake.args.model = "other"
        await until(lambda: rig.deaths)
        assert not rig.is_ready()


async def test_a_pool_of_another_size_is_another_process(engine_folder: Path, brisk: None) -> None:
    async with fake_engine(engine_folder, "--dev-mode") as (fake, url), connected(url) as rig:
        epoch = rig.engine.member.epoch
        fake.args.num_blocks += 1
        fake.ranks[0].pool.num_blocks += 1
        await until(lambda: rig.engine.member.epoch != epoch and rig.is_ready())
        assert not rig.deaths, "as the same engine may have, after a start"


class RestartingApi(ScriptedApi):
    """Starts again whenever it is asked for its model."""

    async def tokenize(self, text: str) -> list[int]:
        assert isinstance(self.counts, EngineLoad)
        self.counts = EngineLoad(self.counts.started_s + 1.0, 0, 0, 256, BLOCK, 0.0)
        return [1]

    async def number_format(self) -> str:
        return "float32/dense"


async def test_facts_are_those_of_one_process(engine_folder: Path) -> None:
    reader = FactsReader(RestartingApi(), engine_folder, digests_weights=True)
    with pytest.raises(EngineLostError, match="restarted while"):
        await reader.read()


class RenderingApi(ScriptedApi):
    """An engine that renders chats, except those with tools."""

    apis = ("/v1/chat/completions",)
    kinds: tuple[str, ...] = ()
    first_id = 1

    async def tokenize(self, text: str) -> list[int]:
        return [1]

    async def number_format(self) -> str:
        return "float32/dense"

    async def text_apis(self) -> tuple[str, ...]:
        return self.apis

    async def media(self) -> tuple[str, ...]:
        return self.kinds

    async def render(self, call: EngineCall) -> Rendered:
        body = json.loads(call.body)
        if "tools" in body:
            raise EngineRefusedError(400, "no tools")
        return Rendered(((self.first_id, len(body["messages"])),), (9,))


async def test_other_prompts_or_apis_are_another_engine(engine_folder: Path) -> None:
    """An engine that restarts with another template must not pass for the old one."""
    api = RenderingApi()
    reader = FactsReader(api, engine_folder, digests_weights=True, renders=True)
    before, _ = await reader.read()
    again, _ = await reader.read()
    assert before.changes(again) == []
    api.first_id = 2
    other, _ = await reader.read()
    assert [change.split(":")[0] for change in before.changes(other)] == ["chat_probes"]
    api.first_id, api.kinds = 1, ("image",)
    seeing, _ = await reader.read()
    assert [change.split(":")[0] for change in before.changes(seeing)] == ["media"]
    api.apis = ()
    without, _ = await reader.read()
    assert without.chat_probes == ""
    assert "text_apis" in " ".join(other.changes(without))
    dated, _ = await FactsReader(RenderingApi(), engine_folder, digests_weights=True).read()
    assert dated.chat_probes == "", "of a template with the date"


async def test_changed_files_of_the_model_are_another_engine(engine: EngineProcess) -> None:
    engine.start("--dev-mode")
    async with connected(engine.url) as rig:
        engine.kill()
        (engine.folder / "model.safetensors").write_bytes(b"other weights")
        engine.start("--dev-mode")
        await until(lambda: rig.deaths)
        assert "files: " in str(rig.deaths[0])


async def test_a_frozen_engine_is_slow_first_and_lost_later(
    engine: EngineProcess, brisk: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.start()
    async with connected(engine.url) as rig:
        epoch, loads = rig.engine.member.epoch, rig.loads
        loads.clear()
        monkeypatch.setattr(watch, "PROBE_S", 0.1)
        engine.signal(signal.SIGSTOP)
        await until(lambda: rig.load.is_slow)
        await until(lambda: rig.load.draining)
        slow = next(load for load in loads if load.is_slow)
        assert not slow.draining, "one slow answer excludes nobody"
        monkeypatch.setattr(watch, "PROBE_S", HANG_S)
        engine.signal(signal.SIGCONT)
        await until(lambda: rig.is_ready() and not rig.load.is_slow)
        assert isinstance((await rig.answer(make_request()))[-1], End)
        assert rig.engine.member.epoch == epoch
        assert not rig.deaths


def test_the_process_ends_with_status_1(engine: EngineProcess, tmp_path: Path) -> None:
    engine.start("--dev-mode")
    options = ["--engine", "vllm", "--engine-url", engine.url, "--host", "127.0.0.1", "--port", "0"]
    log = tmp_path / "worker.log"
    with log.open("wb") as errors:
        worker = subprocess.Popen(
            [sys.executable, "-m", "worker", *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=errors
        )
    try:
        assert worker.stdout is not None
        events = [json.loads(worker.stdout.readline())["event"] for _ in range(2)]
        assert events == ["listening", "ready"]
        engine.kill()
        engine.start("--dev-mode", "--dtype", "bfloat16")
        assert worker.wait(HANG_S) == 1, "so that its supervisor starts it again, for what is there"
        assert "number_format: float32/dense -> bfloat16/dense" in log.read_text()
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()
