"""The latency that gateway and adapter add over a real engine, against that engine's own chat API."""

from __future__ import annotations

import asyncio
import statistics
from typing import Final

from benchmarks.dev.engines_load.routers import headstart
from benchmarks.dev.engines_load.vllm import Engine
from benchmarks.dev.gateway_load.processes import MODEL, make_bundle, until_ready
from benchmarks.dev.gateway_load.traffic import Traffic
from benchmarks.replay_load.client import ChatClient, Target
from benchmarks.replay_load.summary import mean
from benchmarks.replay_load.workload import Turn
from benchmarks.report import Figure

NUM_STREAMS: Final = (1, 8, 32)
PROMPT_TOKENS: Final = 200
OUTPUT_TOKENS: Final = 32
REQUESTS_PER_STREAM: Final = 3


async def measure(engine: Engine, *, rounds: int) -> list[Figure]:
    """Measure the engine and what stands in front of it, in alternation."""
    traffic = Traffic(MODEL, make_bundle()[1])
    figures = []
    with headstart([engine]) as url:
        await until_ready(url)
        for each in (engine.url, url):
            await _ask(each, traffic, 1)
        for num_streams in NUM_STREAMS:
            direct, ours = [], []
            for _ in range(rounds):
                direct.append(await _ask(engine.url, traffic, num_streams))
                ours.append(await _ask(url, traffic, num_streams))
            added_s = statistics.median(there[0] - here[0] for here, there in zip(direct, ours, strict=True))
            share = statistics.median(there[1] / here[1] for here, there in zip(direct, ours, strict=True))
            note = f"{num_streams} streams of {OUTPUT_TOKENS} tokens after {PROMPT_TOKENS}"
            figures += [
                Figure(f"real.{num_streams}.added_ttft_s", added_s, "s", f"{note}, of {_median(direct, 0):.3f} s"),
                Figure(f"real.{num_streams}.tokens_per_s", _median(ours, 1), "1/s", "through gateway and adapter"),
                Figure(
                    f"real.{num_streams}.direct_tokens_per_s", _median(direct, 1), "1/s", "of the engine without them"
                ),
                Figure(f"real.{num_streams}.tokens_per_s_ratio", share, "x", "median of the rounds' ratios"),
            ]
    return figures


async def _ask(url: str, traffic: Traffic, num_streams: int) -> tuple[float, float]:
    """Return the mean time to the first token, and tokens/s."""
    target = Target("", url, MODEL)
    fields = {"ignore_eos": True}
    async with ChatClient(target, max_tokens=OUTPUT_TOKENS, timeout_s=300.0, fields=fields) as client:

        async def stream() -> list[float]:
            ttfts = []
            for number in range(REQUESTS_PER_STREAM):
                messages = [{"role": "user", "content": traffic.text(PROMPT_TOKENS)}]
                outcome = await client.ask("", number, Turn(messages, None))
                if outcome.error is not None:
                    raise SystemExit(f"{url}: {outcome.error}")
                ttfts.append(outcome.ttft_s)
            return ttfts

        ttfts = await asyncio.gather(*(stream() for _ in range(num_streams)))
        elapsed_s = client.elapsed_s()
    num_tokens = num_streams * REQUESTS_PER_STREAM * OUTPUT_TOKENS
    return mean([ttft_s for each in ttfts for ttft_s in each]), num_tokens / elapsed_s


def _median(results: list[tuple[float, float]], field: int) -> float:
    return statistics.median(result[field] for result in results)
