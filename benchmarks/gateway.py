"""`headstart bench gateway`: what the gateway adds to a worker that answers at once.

One gateway process on one core; stub worker, Redis and load client on the other. Every figure has a twin `proxy_...`
of a bare Starlette proxy in the same run, since the same machine an hour later is another machine.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import aiohttp
import uvloop
from tokenizers import Tokenizer

from benchmarks.gateway_load.client import latencies, throughput
from benchmarks.gateway_load.traffic import Traffic
from benchmarks.report import Figure, Report, option_parser, publish
from server.serve.redis import find_redis_server, redis_command, redis_url, socket_path
from worker.model.bpe import tokenizer_from_gguf
from worker.model.checkpoint import find_checkpoint
from worker.model.gguf import GGUFCheckpoint
from worker.wire import TokenizerBundle, pack

MODEL: Final = "bench"
STREAM_TOKENS: Final = 400
IDLE_STREAMS: Final = 960
START_TIMEOUT_S: Final = 30.0


def main(argv: Sequence[str]) -> int:
    parser = option_parser("gateway", "What the gateway adds to a worker that answers at once.")
    parser.add_argument("--requests", type=int, default=2000, help="of each throughput measurement (default 2000)")
    parser.add_argument("--samples", type=int, default=300, help="of each latency (default 300)")
    parser.add_argument("--streams", type=int, default=256, help="at once (default 256)")
    parser.add_argument("--rate", type=float, default=150.0, help="tokens/s offered to each stream (default 150)")
    options = parser.parse_args(argv)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, ExitStack() as stack:
        figures = runner.run(_measure(stack, options.requests, options.samples, options.streams, options.rate))
    publish(Report("gateway", figures, {"streams": options.streams, "offered_per_stream": options.rate}), options)
    return 0


async def _measure(
    stack: ExitStack, num_requests: int, num_samples: int, num_streams: int, rate: float
) -> list[Figure]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    cores = sorted(os.sched_getaffinity(0))
    gateway_core, other_core = cores[0], cores[-1]
    os.sched_setaffinity(0, {other_core})
    bundle, tokenizer = _bundle()
    (folder / "bundle").write_bytes(pack(bundle))
    stack.enter_context(_process(redis_command(find_redis_server(), folder), other_core))
    await _until(lambda: socket_path(folder).exists())
    redis = redis_url(folder)
    figures: list[Figure] = []
    traffic = Traffic(MODEL, tokenizer)
    chat = "/v1/chat/completions"
    with _stub(folder, other_core, redis=redis) as stub, _gateway(stub, gateway_core, redis) as gateway:
        await _until_ready(gateway)
        with _proxy(stub, gateway_core) as proxy:
            await _until_ready(proxy)
            short = [traffic.chat(200) for _ in range(num_samples)]
            turns = [traffic.two_turns(4000) for _ in range(max(20, num_samples // 4))]
            for url in (gateway, proxy, stub):
                await latencies(url + chat, short[:50])
            direct_s = statistics.median(await latencies(stub + chat, short))
            for name, url in (("", gateway), ("proxy_", proxy)):
                added_s = statistics.median(await latencies(url + chat, short)) - direct_s
                goal = "" if name else "<= 0.0011"
                figures.append(Figure(f"{name}added_p50_s_200", added_s, "s", "to a 200-token prompt", goal))
            direct_s = statistics.median(await latencies(stub + chat, [second for _, second in turns]))
            for name, url in (("", gateway), ("proxy_", proxy)):
                seconds = [(await latencies(url + chat, turn))[1] for turn in turns]
                goal = "" if name else "<= 0.003"
                note = "to the second turn of a 4,000-token conversation"
                figures.append(
                    Figure(f"{name}added_p50_s_4000_turn2", statistics.median(seconds) - direct_s, "s", note, goal)
                )
            for name, url in (("", gateway), ("proxy_", proxy)):
                bodies = [traffic.chat(200) for _ in range(num_requests)]
                rps = (await throughput(url + chat, bodies, 16)).per_s
                goal = "" if name else ">= 1200"
                figures.append(Figure(f"{name}requests_per_s", rps, "1/s", "200 tokens, 16 connections", goal))
    figures += await _streams(folder, (gateway_core, other_core), redis, traffic, num_streams, rate)
    return figures


async def _streams(
    folder: Path, cores: tuple[int, int], redis: str, traffic: Traffic, num_streams: int, rate: float
) -> list[Figure]:
    """One frame a token, paced above what is asked for: what comes out is what the gateway can do."""
    figures = []
    chat = "/v1/chat/completions"
    bodies = [traffic.chat(50, max_tokens=STREAM_TOKENS, stream=True) for _ in range(num_streams)]
    with _stub(folder, cores[1], redis=redis, pace_s=1.0 / rate) as stub:
        for name in ("", "proxy_"):
            front = _proxy(stub, cores[0]) if name else _gateway(stub, cores[0], redis)
            with front as url:
                await _until_ready(url)
                done = await throughput(url + chat, bodies, num_streams)
                goal = "" if name else ">= 25000"
                note = f"over {num_streams} streams, {done.num_events / num_streams / STREAM_TOKENS:.2f} events a token"
                figures.append(Figure(f"{name}stream_tokens_per_s", done.per_s * STREAM_TOKENS, "1/s", note, goal))
    with (
        _stub(folder, cores[1], redis=redis, pace_s=3600.0) as stub,
        _gateway_process(stub, cores[0], redis) as (url, ops, process),
    ):
        await _until_ready(url)
        waiting = [asyncio.create_task(throughput(url + chat, bodies[:50], 50))]
        await _until_open(ops, 50)
        before = _rss_bytes(process)
        waiting.append(asyncio.create_task(throughput(url + chat, (bodies * 8)[:IDLE_STREAMS], IDLE_STREAMS)))
        await _until_open(ops, 50 + IDLE_STREAMS)
        per_stream = (_rss_bytes(process) - before) / IDLE_STREAMS
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        figures.append(Figure("bytes_per_stream", per_stream, "B", f"of {IDLE_STREAMS} open streams", "<= 61440"))
    return figures


def _bundle() -> tuple[TokenizerBundle, Tokenizer]:
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
        max_model_len=8192,
        block_size=16,
    )
    return bundle, tokenizer


@contextmanager
def _process(command: Sequence[str], core: int, *, stdout: int | None = None) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=stdout, text=True, env={**os.environ, "TOKENIZERS_PARALLELISM": "false"})
    os.sched_setaffinity(process.pid, {core})
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def _stub(folder: Path, core: int, *, redis: str, pace_s: float = 0.0) -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.gateway_load.stub", "--bundle", str(folder / "bundle")]
    command += ["--redis", redis, "--pace-s", str(pace_s)]
    with _process(command, core, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()


@contextmanager
def _gateway(stub: str, core: int, redis: str) -> Iterator[str]:
    with _gateway_process(stub, core, redis) as (url, _, _):
        yield url


@contextmanager
def _gateway_process(stub: str, core: int, redis: str) -> Iterator[tuple[str, str, int]]:
    port, ops_port = _free_ports(2)
    command = [sys.executable, "-m", "server.gateway", "--port", str(port), "--ops-port", str(ops_port)]
    command += ["--redis", redis, "--workers", stub, "--log-level", "error", "--drain-grace-s", "1"]
    with _process(command, core) as process:
        yield f"http://127.0.0.1:{port}", f"http://127.0.0.1:{ops_port}", process.pid


@contextmanager
def _proxy(stub: str, core: int) -> Iterator[str]:
    (port,) = _free_ports(1)
    with _process([sys.executable, "-m", "benchmarks.gateway_load.proxy", stub, str(port)], core):
        yield f"http://127.0.0.1:{port}"


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 (another process makes it true)
            await asyncio.sleep(0.01)


async def _until_ready(url: str) -> None:
    async with asyncio.timeout(START_TIMEOUT_S), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(url + "/health/ready") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)


async def _until_open(ops: str, num_streams: int) -> None:
    """So many streams have got their first token."""
    async with asyncio.timeout(4 * START_TIMEOUT_S), aiohttp.ClientSession() as session:
        while True:
            async with session.get(ops + "/metrics") as response:
                text = await response.text()
            if f"\nheadstart_time_to_first_token_seconds_count {num_streams:.1f}" in text:
                return
            await asyncio.sleep(0.2)


def _rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
