"""The processes of a gateway's bench: each pinned to a core, ended with its context."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import AnyStr, Final

import aiohttp
from tokenizers import Tokenizer

from worker.common.command_line import module_command
from worker.model.gguf import GGUFCheckpoint
from worker.model.gguf_tokenizer import tokenizer_from_gguf
from worker.model.load import find_checkpoint
from worker.wire import TokenizerBundle

MODEL: Final = "bench"
START_TIMEOUT_S: Final = 60.0


def make_bundle(max_model_len: int = 8192) -> tuple[TokenizerBundle, Tokenizer]:
    checkpoint = find_checkpoint("")
    assert isinstance(checkpoint, GGUFCheckpoint)
    tokenizer = tokenizer_from_gguf(checkpoint.metadata)
    bundle = TokenizerBundle(
        fingerprint="0" * 32,
        model=MODEL,
        revision="1",
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=str(checkpoint.metadata["tokenizer.chat_template"]),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        eos_token_ids=(2,),
        add_bos=False,
        vocab_size=tokenizer.get_vocab_size(),
        max_model_len=max_model_len,
        block_size=16,
    )
    return bundle, tokenizer


@contextmanager
def started(
    command: Sequence[str],
    core: int | None,
    *,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
) -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, text=True, env=env)
    if core is not None:
        os.sched_setaffinity(process.pid, {core})
    with ended(process):
        yield process


@contextmanager
def ended(process: subprocess.Popen[AnyStr]) -> Iterator[subprocess.Popen[AnyStr]]:
    """Ends the process when this is left."""
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def stub_server(folder: Path, core: int, *, redis: str, pace_s: float = 0.0, num_workers: int = 1) -> Iterator[str]:
    """The URL of the first of `num_workers` workers in one process, once they listen."""
    command = [*module_command("benchmarks.dev.gateway_load.stub"), "--bundle", str(folder / "bundle")]
    command += ["--redis", redis, "--pace-s", str(pace_s), "--num-workers", str(num_workers)]
    with started(command, core, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()


@contextmanager
def gateway_server(stub: str, core: int, redis: str) -> Iterator[str]:
    with gateway_process(stub, core, redis) as (url, _, _):
        yield url


@contextmanager
def gateway_process(stub: str, core: int | None, redis: str, *options: str) -> Iterator[tuple[str, str, int]]:
    """Public URL, ops URL and process id."""
    port, ops_port = free_ports(2)
    command = [*module_command("server.gateway"), "--port", str(port), "--ops-port", str(ops_port)]
    command += ["--redis", redis, "--workers", stub, "--log-level", "error", "--drain-grace-s", "1", *options]
    with started(command, core) as process:
        yield f"http://127.0.0.1:{port}", f"http://127.0.0.1:{ops_port}", process.pid


@contextmanager
def adapter_process(engine: str, core: int | None, redis: str, *options: str) -> Iterator[tuple[str, int]]:
    """URL and process id of an adapter in front of `engine`, once it serves. Raises SystemExit if it cannot."""
    command = [*module_command("worker"), "--engine", "vllm", "--engine-url", engine, "--port", "0"]
    command += ["--redis", redis, "--log-level", "warning", "--drain-grace-s", "1", *options]
    with started(command, core, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                yield event["url"], process.pid
                return
        raise SystemExit(f"the adapter of {engine} does not serve: see above")


@contextmanager
def proxy_server(stub: str, core: int) -> Iterator[str]:
    (port,) = free_ports(1)
    with started([*module_command("benchmarks.dev.gateway_load.proxy"), stub, str(port)], core):
        yield f"http://127.0.0.1:{port}"


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 (another process makes it true)
            await asyncio.sleep(0.01)


async def until_ready(url: str, num_workers: int | None = 1) -> None:
    """Wait until the gateway serves with `num_workers` workers; None: with any."""
    async with asyncio.timeout(START_TIMEOUT_S), aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url + "/health/ready") as response:
                    found = await response.json()
                    if response.status == 200 and num_workers in (None, found["workers"]):
                        return
            await asyncio.sleep(0.05)


def cpu_s(pid: int) -> float:
    """Processor time of all threads of a process."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def scrape(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Return the metrics by their names and labels; none of a server that has none."""
    async with session.get(url + "/metrics") as response:
        text = await response.text() if response.status == 200 else ""
    return {name: float(value) for name, value in re.findall(r"^(\w+(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE)}
