"""The cost of an adapter over an engine that answers at once, against a gateway over such a worker."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from benchmarks.dev.gateway_load.client import latencies, throughput
from benchmarks.dev.gateway_load.processes import cpu_s, until_ready
from benchmarks.dev.gateway_load.site import Site, prepare
from benchmarks.report import Figure

CHAT: Final = "/v1/chat/completions"
PROMPT_TOKENS: Final = 200
STREAM_TOKENS: Final = 400
_WARM_UP: Final = 50


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is asked, in each round of each figure."""

    rounds: int
    samples: int
    streams: int
    rate: float


async def measure(stack: ExitStack, sizes: Sizes) -> list[Figure]:
    """Measure both, in alternation."""
    site = await prepare(stack)
    return [*await _added(site, sizes), *await _cpu(site, sizes)]


async def _added(site: Site, sizes: Sizes) -> list[Figure]:
    """Seconds to the first token of a prompt, over those without anything in front of the stub."""
    direct: list[float] = []
    alone: list[float] = []
    adapted: list[float] = []
    with site.stub() as stub, site.gateway(stub) as (gateway, _, _), site.adapted() as both:
        for url in (gateway, both.url):
            await until_ready(url)
        for url in (stub, gateway, both.url):
            await latencies(url + CHAT, _first_tokens(site, _WARM_UP))
        for _ in range(sizes.rounds):
            bodies = _first_tokens(site, sizes.samples)
            for url, medians in ((stub, direct), (gateway, alone), (both.url, adapted)):
                medians.append(statistics.median(await latencies(url + CHAT, bodies)))
    alone_s = [there - here for here, there in zip(direct, alone, strict=True)]
    adapted_s = [there - here for here, there in zip(direct, adapted, strict=True)]
    note = f"to the first token of a {PROMPT_TOKENS}-token prompt"
    return [
        Figure("gateway_added_p50_s_200", statistics.median(alone_s), "s", f"{note}, by a gateway over a worker"),
        Figure("added_p50_s_200", statistics.median(adapted_s), "s", f"{note}, by gateway and adapter over an engine"),
        Figure("added_p50_s_200_ratio", _ratio(adapted_s, alone_s), "x", "the one over the other", "<= 2.2"),
    ]


async def _cpu(site: Site, sizes: Sizes) -> list[Figure]:
    """Processor time a token of streams that are paced well within what the processes can do."""
    pace_s = 1.0 / sizes.rate
    gateway_s, adapter_s, behind_s = [], [], []
    num_tokens = sizes.streams * STREAM_TOKENS
    with site.stub(pace_s=pace_s) as stub, site.gateway(stub) as (url, _, gateway), site.adapted(pace_s=pace_s) as both:
        for each in (url, both.url):
            await until_ready(each)
        for _ in range(sizes.rounds):
            bodies = [site.traffic.chat(50, max_tokens=STREAM_TOKENS, stream=True) for _ in range(sizes.streams)]
            before = cpu_s(gateway)
            await throughput(url + CHAT, bodies, sizes.streams)
            gateway_s.append((cpu_s(gateway) - before) / num_tokens)
            before, before_behind = cpu_s(both.adapter), cpu_s(both.gateway)
            await throughput(both.url + CHAT, bodies, sizes.streams)
            adapter_s.append((cpu_s(both.adapter) - before) / num_tokens)
            behind_s.append((cpu_s(both.gateway) - before_behind) / num_tokens)
    note = f"of {sizes.streams} streams of {sizes.rate:.0f} tokens/s"
    return [
        Figure("gateway_cpu_s_per_token", statistics.median(gateway_s), "s", f"{note}, of a gateway over a worker"),
        Figure("gateway_cpu_s_per_token_adapted", statistics.median(behind_s), "s", f"{note}, of one over an adapter"),
        Figure("added_cpu_s_per_token", statistics.median(adapter_s), "s", f"{note}, of the adapter"),
        Figure("added_cpu_ratio", _ratio(adapter_s, gateway_s), "x", "adapter over gateway", "<= 1"),
    ]


def _first_tokens(site: Site, count: int) -> list[bytes]:
    return [site.traffic.chat(PROMPT_TOKENS, max_tokens=1, stream=True) for _ in range(count)]


def _ratio(these: Sequence[float], those: Sequence[float]) -> float:
    """Return the median of the rounds' ratios: load that comes and goes meets both alike."""
    return statistics.median(this / that for this, that in zip(these, those, strict=True))
