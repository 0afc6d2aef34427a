"""`headstart bench gateway`: what the gateway adds to a worker that answers at once.

One gateway process on one core; stub worker, Redis and load client on the other. Every figure has a twin `proxy_...`
of a bare Starlette proxy in the same run, since the same machine an hour later is another machine; with `--peers` also
of other people's routers.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Final

import aiohttp
import uvloop

from benchmarks.dev.gateway_load.client import latencies, post, throughput
from benchmarks.dev.gateway_load.peers import Peer, installed
from benchmarks.dev.gateway_load.processes import (
    START_TIMEOUT_S,
    free_ports,
    gateway_server,
    proxy_server,
    rss_bytes,
    scrape,
    started,
    until_ready,
)
from benchmarks.dev.gateway_load.site import Site, prepare
from benchmarks.dev.gateway_load.slow import Rate, SlowReader, open_streams, rate_of
from benchmarks.report import Figure, Report, option_parser, publish

CHAT: Final = "/v1/chat/completions"
STREAM_TOKENS: Final = 400
IDLE_STREAMS: Final = 960
NUM_STREAMS: Final = 1000
NUM_SLOW: Final = 64
SLOW_BENCH_RATE: Final = 8.0
"""Tokens/s of each of those: well within what one process can do, so that a drop has another cause."""
ENDLESS_TOKENS: Final = 8000
SETTLE_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is asked of each front."""

    requests: int
    samples: int
    streams: int
    rate: float
    slow_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """Settings that all measurements share."""

    site: Site
    sizes: Sizes
    peers: Path | None
    """The folder with the programs of other people's routers."""


Started = AbstractContextManager[str]
"""A running server; entering it gives its URL."""


def main(argv: Sequence[str]) -> int:
    parser = option_parser("gateway", "What the gateway adds to a worker that answers at once.")
    parser.add_argument("--requests", type=int, default=2000, help="of each throughput measurement (default 2000)")
    parser.add_argument("--samples", type=int, default=300, help="of each latency (default 300)")
    parser.add_argument("--streams", type=int, default=256, help="at once (default 256)")
    parser.add_argument("--rate", type=float, default=150.0, help="tokens/s offered to each stream (default 150)")
    parser.add_argument("--slow-s", type=float, default=12.0, help="of 1,000 streams with slow readers; 0: none (12)")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="where sglang-router and vllm-router are installed")
    options = parser.parse_args(argv)
    missing = [] if options.peers is None else installed(options.peers)[1]
    sizes = Sizes(options.requests, options.samples, options.streams, options.rate, options.slow_s)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, ExitStack() as stack:
        figures = runner.run(_measure(stack, sizes, options.peers))
    publish(Report("gateway", figures, {"streams": sizes.streams, "offered_per_stream": sizes.rate}), options)
    for line in missing:
        print(line, file=sys.stderr)
    return 0


async def _measure(stack: ExitStack, sizes: Sizes, peers: Path | None) -> list[Figure]:
    bench = Bench(await prepare(stack), sizes, peers)
    figures = await _requests(bench)
    figures += await _streams(bench)
    figures.append(await _memory(bench))
    if sizes.slow_s:
        figures += await _slow_readers(bench)
    return figures


def _fronts(bench: Bench, stub: str) -> list[tuple[str, Started]]:
    """Return the servers before the stub with the prefix of their figures: ours, the bare proxy, the peers."""
    fronts: list[tuple[str, Started]] = [
        ("", gateway_server(stub, bench.site.gateway_core, bench.site.redis)),
        ("proxy_", proxy_server(stub, bench.site.gateway_core)),
    ]
    if bench.peers is not None:
        for peer in installed(bench.peers)[0]:
            fronts.append((f"{peer.name}_", _peer(peer, bench.peers, stub, bench.site.gateway_core)))
    return fronts


async def _requests(bench: Bench) -> list[Figure]:
    """Latency added and requests/s, unstreamed, of every front in turn between the same samples."""
    figures: list[Figure] = []
    traffic, sizes = bench.site.traffic, bench.sizes
    with ExitStack() as stack:
        stub = stack.enter_context(bench.site.stub())
        fronts = [(name, stack.enter_context(front)) for name, front in _fronts(bench, stub)]
        for _, url in fronts:
            await _until_answering(url, traffic.chat(20))
        short = [traffic.chat(200) for _ in range(sizes.samples)]
        turns = [traffic.two_turns(4000) for _ in range(max(20, sizes.samples // 4))]
        for url in (*(url for _, url in fronts), stub):
            await latencies(url + CHAT, short[:50])
        direct_s = statistics.median(await latencies(stub + CHAT, short))
        for name, url in fronts:
            added_s = statistics.median(await latencies(url + CHAT, short)) - direct_s
            goal = "" if name else "<= 0.0011"
            figures.append(Figure(f"{name}added_p50_s_200", added_s, "s", "to a 200-token prompt", goal))
        direct_s = statistics.median(await latencies(stub + CHAT, [second for _, second in turns]))
        for name, url in fronts:
            seconds = [(await latencies(url + CHAT, turn))[1] for turn in turns]
            goal = "" if name else "<= 0.003"
            note = "to the second turn of a 4,000-token conversation"
            added_s = statistics.median(seconds) - direct_s
            figures.append(Figure(f"{name}added_p50_s_4000_turn2", added_s, "s", note, goal))
        for name, url in fronts:
            bodies = [traffic.chat(200) for _ in range(sizes.requests)]
            rps = (await throughput(url + CHAT, bodies, 16)).per_s
            goal = "" if name else ">= 1200"
            figures.append(Figure(f"{name}requests_per_s", rps, "1/s", "200 tokens, 16 connections", goal))
    values = {figure.name: figure.value for figure in figures}
    for name in ("added_p50_s_200", "added_p50_s_4000_turn2", "requests_per_s"):
        figures.append(Figure(f"{name}_over_proxy", values[name] / values[f"proxy_{name}"], "x", "the same run"))
    return figures


async def _streams(bench: Bench) -> list[Figure]:
    """One frame a token, paced above what is asked for: what comes out is what the front can do."""
    figures = []
    num_streams = bench.sizes.streams
    bodies = [bench.site.traffic.chat(50, max_tokens=STREAM_TOKENS, stream=True) for _ in range(num_streams)]
    with bench.site.stub(pace_s=1.0 / bench.sizes.rate) as stub:
        for name, front in _fronts(bench, stub):
            with front as url:
                await _until_answering(url, bench.site.traffic.chat(20, max_tokens=1))
                done = await throughput(url + CHAT, bodies, num_streams)
                goal = "" if name else ">= 25000"
                note = f"over {num_streams} streams, {done.num_events / num_streams / STREAM_TOKENS:.2f} events a token"
                figures.append(Figure(f"{name}stream_tokens_per_s", done.per_s * STREAM_TOKENS, "1/s", note, goal))
    return figures


async def _memory(bench: Bench) -> Figure:
    bodies = [bench.site.traffic.chat(50, max_tokens=STREAM_TOKENS, stream=True) for _ in range(bench.sizes.streams)]
    with (
        bench.site.stub(pace_s=3600.0) as stub,
        bench.site.gateway(stub) as (url, ops, process),
    ):
        await until_ready(url)
        waiting = [asyncio.create_task(throughput(url + CHAT, list(islice(cycle(bodies), 50)), 50))]
        await _until_open(ops, 50)
        before = rss_bytes(process)
        idle = list(islice(cycle(bodies), IDLE_STREAMS))
        waiting.append(asyncio.create_task(throughput(url + CHAT, idle, IDLE_STREAMS)))
        await _until_open(ops, 50 + IDLE_STREAMS)
        per_stream = (rss_bytes(process) - before) / IDLE_STREAMS
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return Figure("bytes_per_stream", per_stream, "B", f"of {IDLE_STREAMS} open streams", "<= 61440")


async def _slow_readers(bench: Bench) -> list[Figure]:
    """1,000 streams without end, 64 of them read a byte a second: the rate of the others, and memory, before and
    after the slow ones have come."""
    seconds = bench.sizes.slow_s
    body = bench.site.traffic.chat(50, max_tokens=ENDLESS_TOKENS, stream=True)
    with (
        bench.site.stub(pace_s=1.0 / SLOW_BENCH_RATE) as stub,
        bench.site.gateway(stub) as (url, _, process),
    ):
        await until_ready(url)
        request = post(url + CHAT, body)
        streams = await open_streams(url, request, NUM_STREAMS - NUM_SLOW)
        grown: list[int] = []
        rates: list[Rate] = []
        slow: list[asyncio.Task[None]] = []
        for num_slow in (0, NUM_SLOW):
            slow = [asyncio.create_task(SlowReader(url, request).run()) for _ in range(num_slow)]
            await asyncio.sleep(SETTLE_S)
            before = rss_bytes(process)
            rates.append(await rate_of(streams, seconds))
            grown.append(rss_bytes(process) - before)
        assert not any(task.done() for task in slow), "a slow reader has lost its stream"
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        for stream in streams:
            stream.close()
    assert not rates[-1].num_lost, "a stream has ended"
    alone, with_slow = rates
    note = f"{NUM_STREAMS - NUM_SLOW} streams next to {NUM_SLOW} of a byte a second, over those without"
    per_slow = (grown[1] - grown[0]) / NUM_SLOW
    return [
        Figure("slow_readers_others_tokens_per_s", with_slow.per_s, "1/s", f"of {alone.per_s:,.0f} without them"),
        Figure("slow_readers_others_ratio", with_slow.per_s / alone.per_s, "x", note, ">= 0.97"),
        Figure("slow_readers_bytes_each", per_slow, "B", f"grown in {seconds:.0f} s, over that without", "<= 65536"),
    ]


@contextmanager
def _peer(peer: Peer, folder: Path, stub: str, core: int) -> Iterator[str]:
    port, metrics_port = free_ports(2)
    quiet = subprocess.DEVNULL
    with started(peer.command(folder, stub, port, metrics_port), core, stdout=quiet, stderr=quiet):
        yield f"http://127.0.0.1:{port}"


async def _until_answering(url: str, body: bytes) -> None:
    """A request sent now is answered: peers are ready in ways of their own."""
    async with asyncio.timeout(START_TIMEOUT_S), aiohttp.ClientSession() as session:
        headers = {"content-type": "application/json"}
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(url + CHAT, data=body, headers=headers) as response:
                    await response.read()
                    if response.status == 200:
                        return
            await asyncio.sleep(0.05)


async def _until_open(ops: str, num_streams: int) -> None:
    """Wait until `num_streams` streams have their first token."""
    async with asyncio.timeout(4 * START_TIMEOUT_S), aiohttp.ClientSession() as session:
        while True:
            if (await scrape(session, ops))["headstart_time_to_first_token_seconds_count"] == num_streams:
                return
            await asyncio.sleep(0.2)
