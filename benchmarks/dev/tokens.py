"""`headstart bench tokens`: what a token costs between the engine and the client, by process, at 1 to 256 streams.

    fake engine  -> adapter -> gateway -> client    chats, Messages, Responses; with --vllm URL also a real engine
    built-in engine in a worker -> gateway -> client    a model that costs nearly nothing

All costs are processor time of a further token: streams of many tokens less streams of one. Their unit is an empty hop
of the same run: a process that reads a frame and writes it.
"""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import psutil
import uvloop

from benchmarks.dev.engine import Engine
from benchmarks.dev.gateway_load.processes import (
    adapter_process,
    cpu_s,
    free_ports,
    gateway_process,
    started,
    until,
    until_ready,
)
from benchmarks.dev.private_redis import private_redis
from benchmarks.dev.tokens_load.clients import Streams, run_hops, run_streams
from benchmarks.dev.tokens_load.nothing import write_nothing
from benchmarks.report import Figure, Report, option_parser, percentile, publish
from tests.tiny_model import write_tiny_model
from worker.common.command_line import module_command
from worker.model.config import LoadOptions
from worker.model.load import load_model

APIS: Final = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
MODEL: Final = "bench"
PROMPT: Final = "Describe the way from London to Boston, by air and by sea, with all costs and dates."
FRAME: Final = b"x" * 256
STEP_S_A_STREAM: Final = 0.0005
"""The fake engine's step: what its server of one Python process can keep up with."""
MIN_STEP_S: Final = 0.01
NUM_BLOCKS: Final = 16_384
BLOCK_SIZE: Final = 16
USUAL: Final = 64
"""Scripts read the figures of this many streams."""


@dataclass(frozen=True, slots=True)
class Thread:
    """A process, or one thread of it, whose time is measured."""

    name: str
    pid: int
    is_loop: bool | None = None
    """True: only the thread of its event loop; False: all others; None: all."""

    def cpu_s(self) -> float:
        main = Path(f"/proc/{self.pid}/task/{self.pid}/schedstat")
        loop_s = int(main.read_text().split()[0]) / 1e9
        return loop_s if self.is_loop else cpu_s(self.pid) - (0.0 if self.is_loop is None else loop_s)

    def num_calls(self) -> int:
        """Return the reads and writes of its process so far. Those by send and recv are not among them."""
        counts = dict(line.split(": ") for line in Path(f"/proc/{self.pid}/io").read_text().splitlines())
        return int(counts["syscr"]) + int(counts["syscw"])


@dataclass(frozen=True, slots=True)
class Way:
    """One way of tokens to a client."""

    name: str
    url: str
    threads: Sequence[Thread]


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of some streams."""

    seconds: tuple[float, ...]
    """Processor time by thread."""
    calls: tuple[int, ...]
    streams: Streams


def main(argv: list[str]) -> int:
    parser = option_parser("tokens", "What a token costs between the engine and the client, by process.")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256], help="at once (1 16 64 256)")
    parser.add_argument("--tokens", type=int, default=128, help="of each stream (128)")
    parser.add_argument("--rounds", type=int, default=3, help="the figures are medians (3)")
    parser.add_argument("--engines", nargs="+", choices=("fake", "own"), default=["fake", "own"])
    parser.add_argument("--apis", nargs="+", choices=list(APIS), default=list(APIS))
    parser.add_argument("--stream-interval", type=int, default=1, help="tokens in an event of the fake engine (1)")
    parser.add_argument("--vllm", metavar="URL", help="a running vLLM, with an adapter of this run, measured too")
    parser.add_argument("--vllm-model", default=MODEL, metavar="NAME", help="the name of its model")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as tiny:
        figures = uvloop.run(_measure(options, write_nothing(Path(folder)), write_tiny_model(Path(tiny))))
    publish(Report("tokens", figures, {"tokens": options.tokens, "rounds": options.rounds}), options)
    return 0


async def _measure(options: Namespace, model: Path, tiny: Path) -> list[Figure]:
    hop_s = median([await _hop_s(options.tokens) for _ in range(options.rounds)])
    figures = [Figure("hop_s", hop_s, "s", f"of the processor a frame, {USUAL} streams through an empty hop")]
    if options.vllm:
        server = Thread("server", _listener(options.vllm))
        with _adapter(options.vllm, "vllm") as way:
            ways = Way("vllm_alone", options.vllm, [server]), Way("vllm", way.url, [*way.threads, server])
            for num_streams in options.streams:
                for each in ways:
                    figures += await _figures(each, options, num_streams, hop_s)
        figures += _over_alone(options.streams, {figure.name: figure.value for figure in figures})
    for num_streams in options.streams if "fake" in options.engines else ():
        with _fake_engine(tiny, num_streams, options.stream_interval) as engine, _adapter(engine, "engine") as way:
            figures += await _figures(way, options, num_streams, hop_s)
    if "own" in options.engines:
        with _own_engine(model) as way:
            for num_streams in options.streams:
                figures += await _figures(way, options, num_streams, hop_s)
        figures += _served(model, options, {figure.name: figure.value for figure in figures})
    return figures


async def _figures(way: Way, options: Namespace, num_streams: int, hop_s: float) -> list[Figure]:
    """Return the cost of a further token for each thread and API."""
    if way.name != "vllm_alone":
        await until_ready(way.url)
    model = options.vllm_model if way.name.startswith("vllm") else MODEL
    figures, num_further = [], num_streams * (options.tokens - 1)
    for api in options.apis if way.name != "own" else ("chat",):
        name = way.name if api == "chat" else f"{way.name}_{api}"
        await _cost(way, api, [_body(api, model, 1, 0)] * 2)
        pairs = []
        for number in range(options.rounds):
            ones = await _cost(way, api, [_body(api, model, 1, number)] * num_streams)
            pairs.append((ones, await _cost(way, api, [_body(api, model, options.tokens, number)] * num_streams)))

        def a_token(of: Callable[[Cost], float], pairs: Sequence[tuple[Cost, Cost]] = pairs) -> float:
            return float(median((of(many) - of(one)) / num_further for one, many in pairs))

        for index, thread in enumerate(way.threads):
            seconds = a_token(lambda cost: cost.seconds[index])  # noqa: B023 (called at once)
            calls = a_token(lambda cost: cost.calls[index])  # noqa: B023
            note = f"{api}: {seconds * 1e6:.1f} us a token, {calls:.2f} reads and writes"
            figures.append(Figure(f"{name}_{thread.name}_hops_{num_streams}", seconds / hop_s, "x", note))
        elapsed_s = a_token(lambda cost: cost.streams.elapsed_s)
        client_s = a_token(lambda cost: cost.streams.client_cpu_s)
        gaps = [gap for _, many in pairs for gap in many.streams.gaps_s]
        events = median(many.streams.num_events for _, many in pairs) / (num_further + num_streams)
        note = f"{events:.2f} events a token; the load client takes {client_s * 1e6:.1f} us of the processor"
        figures += [
            Figure(f"{name}_tokens_per_s_{num_streams}", 1.0 / elapsed_s, "1/s", note),
            Figure(f"{name}_gap_p50_s_{num_streams}", percentile(gaps, 0.5), "s"),
            Figure(f"{name}_gap_p99_s_{num_streams}", percentile(gaps, 0.99), "s"),
        ]
    return figures


def _over_alone(counts: Sequence[int], found: dict[str, float]) -> list[Figure]:
    """Compare a further token of a chat through both hops with one of the engine's server by itself."""
    return [
        Figure(
            f"vllm_over_alone_{num_streams}",
            sum(found[f"vllm_{name}_hops_{num_streams}"] for name in ("gateway", "adapter", "server"))
            / found[f"vllm_alone_server_hops_{num_streams}"],
            "x",
        )
        for num_streams in counts
    ]


def _listener(url: str) -> int:
    """Return the process that listens there, on this machine."""
    port = int(url.rpartition(":")[2])
    listening = [each for each in psutil.net_connections("tcp") if each.status == "LISTEN" and each.laddr.port == port]
    assert listening, f"no process of this machine listens at {url}"
    return int(listening[0].pid)


async def _cost(way: Way, api: str, bodies: Sequence[bytes]) -> Cost:
    seconds, calls = [each.cpu_s() for each in way.threads], [each.num_calls() for each in way.threads]
    streams = await run_streams(way.url + APIS[api], bodies)
    return Cost(
        tuple(each.cpu_s() - before for each, before in zip(way.threads, seconds, strict=True)),
        tuple(each.num_calls() - before for each, before in zip(way.threads, calls, strict=True)),
        streams,
    )


def _body(api: str, model: str, num_tokens: int, number: int) -> bytes:
    """Return a request for an answer of this length."""
    length = "max_output_tokens" if api == "responses" else "max_tokens"
    text = f"{number}: {PROMPT}"
    prompt = {"input": text} if api == "responses" else {"messages": [{"role": "user", "content": text}]}
    exactly = {"temperature": 0.0, "ignore_eos": True}
    return json.dumps({"model": model, "stream": True, length: num_tokens, **prompt, **exactly}).encode()


def _served(model: Path, options: Namespace, found: dict[str, float]) -> list[Figure]:
    """Compare what clients got with what the engine gives in its own process."""
    loaded, figures = load_model(str(model), LoadOptions(dtype="float32")), []
    for num_streams in options.streams:
        rates: list[float] = []
        for number in range(options.rounds):
            engine = Engine(loaded, NUM_BLOCKS, BLOCK_SIZE)
            for index in range(num_streams):
                engine.submit([*PROMPT.encode(), number, index], options.tokens)
            begun_s = time.perf_counter()
            rates.append(engine.drain() / (time.perf_counter() - begun_s))
        per_s = median(rates)
        ratio = found[f"own_tokens_per_s_{num_streams}"] / per_s
        figures.append(
            Figure(f"own_served_ratio_{num_streams}", ratio, "x", f"of {per_s:,.0f} tokens/s in its process")
        )
    return figures


async def _hop_s(num_frames: int) -> float:
    (port,) = free_ports(1)
    with started([*module_command("benchmarks.dev.tokens_load.hop"), str(port)], None) as process:
        await until(lambda: _listens(port))
        before_s = cpu_s(process.pid)
        await run_hops(port, USUAL, num_frames, FRAME)
        return (cpu_s(process.pid) - before_s) / (USUAL * num_frames)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def _fake_engine(model: Path, num_streams: int, stream_interval: int) -> Iterator[str]:
    port, events, replay = free_ports(3)
    step_s = max(MIN_STEP_S, STEP_S_A_STREAM * num_streams)
    sizes = ["--token-s", str(step_s), "--max-num-seqs", "512", "--num-blocks", str(NUM_BLOCKS)]
    sizes += ["--stream-interval", str(stream_interval)]
    cache = ["--events", f"tcp://127.0.0.1:{events}", "--replay", f"tcp://127.0.0.1:{replay}"]
    command = [*module_command("tests.fake_engine"), str(model), "--port", str(port), "--model", MODEL, *sizes, *cache]
    with started(command, None):
        while not _listens(port):
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"


@contextmanager
def _adapter(engine: str, name: str) -> Iterator[Way]:
    with (
        private_redis() as redis,
        adapter_process(engine, None, redis) as (worker, pid),
        gateway_process(worker, None, redis) as (url, _, gateway),
    ):
        yield Way(name, url, [Thread("gateway", gateway), Thread("adapter", pid)])


@contextmanager
def _own_engine(model: Path) -> Iterator[Way]:
    sizes = ["--max-num-seqs", "512", "--num-blocks", str(NUM_BLOCKS), "--block-size", str(BLOCK_SIZE)]
    command = [*module_command("worker"), "--model", str(model), "--served-model-name", MODEL, "--port", "0", *sizes]
    with private_redis() as redis, started([*command, "--redis", redis], None, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        events = (json.loads(line) for line in process.stdout)
        worker = next(event["url"] for event in events if event["event"] == "ready")
        with gateway_process(worker, None, redis) as (url, _, gateway):
            loop, others = Thread("loop", process.pid, is_loop=True), Thread("engine", process.pid, is_loop=False)
            yield Way("own", url, [Thread("gateway", gateway), loop, others])
