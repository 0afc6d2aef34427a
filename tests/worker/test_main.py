"""A real worker process on a tiny checkpoint, from its first line to its exit status."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cache.records import WorkerState
from tests import smollm2
from tests.tiny_model import write_tiny_model
from tests.waiting import HANG_S
from worker.common.frames import FrameReader
from worker.wire import (
    ChoiceState,
    End,
    Failed,
    GenerateRequest,
    Grammar,
    PromptLogprobs,
    SamplingParams,
    TokenizerBundle,
    Tokens,
    pack_request,
    unpack,
)

pytestmark = pytest.mark.e2e

LOSES_ITS_DEVICE = """
import itertools, sys
from worker.main import main
from worker.runner.model_runner import ModelRunner
launch, count = ModelRunner.launch, itertools.count()
def lost(self, step):
    if next(count) > 12:
        raise RuntimeError("device lost")
    return launch(self, step)
ModelRunner.launch = lost
sys.exit(main(sys.argv[1:]))
"""
LOADS_FOREVER = """
import sys
import torch
import worker.loading.engine
from worker.main import main
def build_engine(config, url, worker_id, metrics, report, tls, sinks):
    report("loading for ever")
    while True:
        torch.randn(2000).sort()
worker.loading.engine.build_engine = build_engine
sys.exit(main(sys.argv[1:]))
"""
IS_NAMED_LOOPBACK = """
import socket, sys
from worker.main import main
socket.gethostname = lambda: "127.0.1.1"
sys.exit(main(sys.argv[1:]))
"""
MAY_OPEN_FEW_FILES = """
import resource, sys
from worker.main import main
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
sys.exit(main(sys.argv[1:]))
"""
HANGS = LOSES_ITS_DEVICE.replace('raise RuntimeError("device lost")', "__import__('time').sleep(600)")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


class Process:
    """`python -m worker`, and the JSON lines of its stdout."""

    def __init__(self, *args: str, entry: Sequence[str] = ("-m", "worker")) -> None:
        command = [sys.executable, *entry, "--port", "0", "--threads", "1", *args]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def line(self) -> dict[str, str]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return json.loads(line)

    def ready(self) -> dict[str, str]:
        while (line := self.line())["event"] != "ready":
            pass
        return line

    def end(self, *signals: signal.Signals) -> tuple[int, str]:
        for number in signals:
            self.process.send_signal(number)
        _, stderr = self.process.communicate(timeout=HANG_S)
        return self.process.returncode, stderr


@pytest.fixture
def start() -> Iterator[type[Process]]:
    started: list[Process] = []

    class Started(Process):
        def __init__(self, *args: str, **options: Sequence[str]) -> None:
            super().__init__(*args, **options)
            started.append(self)

    yield Started
    for process in started:
        process.process.kill()
        process.process.communicate()


def request(prompt_ids: list[int], max_tokens: int, *, n: int = 1, temperature: float = 0.0, **params: Any) -> bytes:
    return pack_request(
        GenerateRequest(
            "r",
            "g",
            "",
            b"s" * 16,
            prompt_ids,
            tuple(ChoiceState(i, i) for i in range(n)),
            SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=True, **params),
        )
    )


async def generate(http: aiohttp.ClientSession, url: str, body: bytes) -> tuple[dict[int, list[int]], list]:
    async with http.post(url + "/generate", data=body) as response:
        assert response.status == 200
        frames = list(FrameReader().feed(await response.read()))
    tokens: dict[int, list[int]] = {}
    for frame in frames:
        if isinstance(frame, Tokens):
            tokens.setdefault(frame.choice, []).extend(frame.token_ids)
    return tokens, frames


async def test_a_worker_serves_finds_its_cache_and_drains(start, model: Path) -> None:
    process = start("--model", str(model), "--worker-id", "w1", "--num-blocks", "200", "--served-model-name", "tiny")
    assert process.line()["event"] == "listening"
    ready = process.ready()
    assert (ready["worker_id"], ready["model"]) == ("w1", "tiny")
    url = ready["url"]
    prompt_ids = list(range(5, 105))
    async with aiohttp.ClientSession() as http:
        async with http.get(url + "/state") as response:
            state = unpack(await response.read(), WorkerState)
        assert (state.member.worker_id, state.member.epoch) == ("w1", ready["epoch"])
        assert state.load.num_blocks == 200
        assert state.load.prefill_tokens_per_s > 0
        assert state.member.max_model_len == 199 * 16
        async with http.get(url + "/bundle") as response:
            assert unpack(await response.read(), TokenizerBundle).model == "tiny"
        cold, frames = await generate(http, url, request(prompt_ids, 20))
        assert frames[0].num_cached_tokens == 0
        warm, frames = await generate(http, url, request(prompt_ids, 20))
        assert frames[0].num_cached_tokens == 96
        assert warm == cold
        several, _ = await generate(http, url, request(prompt_ids, 20, n=3))
        assert several == dict.fromkeys(range(3), cold[0])

        _, frames = await generate(http, url, request(prompt_ids, 2, prompt_logprobs=1))
        (logprobs,) = (frame for frame in frames if isinstance(frame, PromptLogprobs))
        first, *others = logprobs.positions
        assert first is None
        assert len(others) == 99
        assert all(position.logprob < 0 and len(position.top) == 1 for position in others)
        assert frames[0].num_cached_tokens == 0  # what is cached has no logits

        schema = Grammar("json_schema", '{"type": "array", "items": {"type": "boolean"}, "maxItems": 3}')
        body = request(prompt_ids, 60, n=3, temperature=1.0, grammar=schema)
        constrained, _ = await generate(http, url, body)
        for token_ids in constrained.values():
            value = json.loads(smollm2.tokenizer().decode(token_ids))
            assert all(isinstance(item, bool) for item in value)
        bad = request(prompt_ids, 60, grammar=Grammar("regex", "(("))
        async with http.post(url + "/generate", data=bad) as response:
            assert response.status == 400
            (failed,) = FrameReader().feed(await response.read())
            assert failed.code == "invalid_grammar"

        async with http.post(url + "/generate", data=request(prompt_ids, 300)) as response:
            reader = FrameReader()
            frames = list(reader.feed(await response.content.readany()))
            process.process.send_signal(signal.SIGTERM)
            async for data in response.content.iter_any():
                frames += reader.feed(data)
        assert isinstance(frames[-1], End)
        assert sum(isinstance(frame, Tokens) for frame in frames) == 300
    code, stderr = process.end()
    assert code == 0, stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    "option",
    [
        ["--model", "/nowhere/at/all"],
        ["--num-blocks", "8", "--kv-cache-memory", "1G"],
        ["--redis", "redis://127.0.0.1:1", "--worker-id", "a:b"],
        ["--device", "cuda:99"],
    ],
)
def test_an_unusable_configuration_exits_with_status_two(start, option: list[str]) -> None:
    code, stderr = start(*option).end()
    assert code == 2
    assert "headstart worker:" in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize("option", ["--worker-ca", "--cluster-secret-file"])
def test_an_unreadable_file_is_named_before_the_model_loads(start, option: str) -> None:
    code, stderr = start(option, "/nowhere/file").end()
    assert code == 2
    assert f"{option} /nowhere/file" in stderr
    assert "loading" not in stderr
    assert "Traceback" not in stderr


async def test_a_lost_device_fails_every_stream_and_ends_the_worker(start, model: Path) -> None:
    process = start("--model", str(model), entry=("-c", LOSES_ITS_DEVICE))
    url = process.ready()["url"]
    async with aiohttp.ClientSession() as http:
        _, frames = await generate(http, url, request([5, 6, 7], 100))
    assert frames[-1] == Failed("worker_lost", "the engine died", retryable=True)
    code, stderr = process.end()
    assert code == 1
    assert "device lost" in stderr


async def test_a_hung_step_ends_the_worker(start, model: Path) -> None:
    process = start("--model", str(model), "--max-step-s", "2", entry=("-c", HANGS))
    url = process.ready()["url"]
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientPayloadError):
            await generate(http, url, request([5, 6, 7], 100))
    code, stderr = process.end()
    assert code == 1
    assert "a step has been running for" in stderr


def test_an_address_that_others_cannot_reach_is_said(start, model: Path) -> None:
    """Debian gives a machine's name the address 127.0.1.1."""
    process = start("--model", str(model), "--host", "0.0.0.0", "--advertise-url=", entry=("-c", IS_NAMED_LOOPBACK))
    assert process.line()["url"].startswith("http://127.0.1.1:")
    code, stderr = process.end(signal.SIGTERM)
    assert code == 0, stderr
    assert "give --advertise-url" in stderr


def test_a_worker_raises_its_limit_of_open_files(start, model: Path) -> None:
    """Each request has a connection, and a login shell often allows 1024 files."""
    process = start("--model", str(model), entry=("-c", MAY_OPEN_FEW_FILES))
    assert process.line()["event"] == "listening"
    soft, hard = resource.prlimit(process.process.pid, resource.RLIMIT_NOFILE)
    assert soft == (1 << 14 if hard == resource.RLIM_INFINITY else min(1 << 14, hard))


def test_sigterm_while_loading_ends_at_once(start, model: Path) -> None:
    process = start("--model", str(model))
    assert process.line()["event"] == "listening"
    code, stderr = process.end(signal.SIGTERM)
    assert code == 0, stderr
    assert "Traceback" not in stderr


def test_sigterm_inside_native_code_exits_cleanly(start) -> None:
    process = start(entry=("-c", LOADS_FOREVER))
    while "loading for ever" not in process.process.stderr.readline():
        pass
    code, stderr = process.end(signal.SIGTERM)
    assert (code, stderr) == (0, "")
