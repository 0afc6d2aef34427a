"""The processor time of a chat behind gateway and adapter, against the engine by itself, over one vLLM engine.

Gateway, adapter and API server of the engine are counted together. What they need while nothing is asked is measured
first and subtracted.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, NamedTuple

from benchmarks.dev.engines_load.vllm import Engine
from benchmarks.dev.gateway_load.client import throughput
from benchmarks.dev.gateway_load.processes import (
    MODEL,
    adapter_process,
    cpu_s,
    gateway_process,
    make_bundle,
    until_ready,
)
from benchmarks.dev.gateway_load.traffic import Traffic
from benchmarks.dev.private_redis import private_redis
from benchmarks.report import Figure

CHAT: Final = "/v1/chat/completions"
PROMPT_TOKENS: Final = 200
STREAM_TOKENS: Final = 128
_CONNECTIONS: Final = 4
_WARM_UP: Final = 20
_IDLE_S: Final = 5.0


class Cost(NamedTuple):
    """Seconds of processor time."""

    gateway: float
    engine: float
    """The API server's."""
    adapter: float

    @property
    def both(self) -> float:
        return self.gateway + self.engine + self.adapter

    def less(self, other: Cost, times: float = 1.0) -> Cost:
        return Cost(*(mine - times * theirs for mine, theirs in zip(self, other, strict=True)))

    def shared(self, count: int) -> Cost:
        return Cost(*(mine / count for mine in self))


@dataclass(frozen=True, slots=True)
class Mode:
    """A gateway, its adapter and its engine."""

    url: str
    pids: tuple[int, int, int]
    """The processes in the order of `Cost`."""

    def now(self) -> Cost:
        return Cost(*map(cpu_s, self.pids))

    async def cost(self, path: str, bodies: Sequence[bytes], num_connections: int, idle: Cost) -> Cost:
        """Return the cost of one request of these. `idle`: the cost of a second without any."""
        before, begun_s = self.now(), time.monotonic()
        await throughput(path, bodies, num_connections)
        elapsed_s = time.monotonic() - begun_s
        return self.now().less(before).less(idle, elapsed_s).shared(len(bodies))


async def measure(engine: Engine, *, rounds: int, samples: int, streams: int) -> list[Figure]:
    """Measure both modes in alternation."""
    traffic = Traffic(MODEL, make_bundle()[1])
    with ExitStack() as stack:
        redis = stack.enter_context(private_redis())
        worker, adapter = stack.enter_context(adapter_process(engine.url, None, redis, "--events-exposed"))
        url, _, pid = stack.enter_context(gateway_process(worker, None, redis))
        await until_ready(url)
        modes = [Mode(engine.url, (pid, engine.pid, adapter)), Mode(url, (pid, engine.pid, adapter))]
        for mode in modes:
            await throughput(mode.url + CHAT, _chats(traffic, _WARM_UP, 2), _CONNECTIONS)
        before = modes[0].now()
        await asyncio.sleep(_IDLE_S)
        idle = modes[0].now().less(before).shared(round(_IDLE_S))
        requests: tuple[list[Cost], list[Cost]] = ([], [])
        tokens: tuple[list[Cost], list[Cost]] = ([], [])
        renders = []
        for _ in range(rounds):
            bodies = _chats(traffic, samples, 1)
            for mode, per_request, per_token in zip(modes, requests, tokens, strict=True):
                one = await mode.cost(mode.url + CHAT, bodies, _CONNECTIONS, idle)
                whole = await mode.cost(mode.url + CHAT, _chats(traffic, streams, STREAM_TOKENS), streams, idle)
                per_request.append(one)
                per_token.append(whole.less(one).shared(STREAM_TOKENS - 1))
            renders.append(await modes[0].cost(f"{engine.url}{CHAT}/render", bodies, _CONNECTIONS, idle))
    render_s = statistics.median(each.engine for each in renders)
    return [
        *_figures("request", requests, f"a streamed chat of {PROMPT_TOKENS} tokens with one of output", "<= 1.8"),
        *_figures("token", tokens, f"a further token of {streams} streams", "<= 1.5"),
        Figure("text.render_cpu_s", render_s, "s", "of it, the engine's API server for the ids of the prompt"),
    ]


def _figures(name: str, costs: tuple[list[Cost], list[Cost]], note: str, goal: str) -> list[Figure]:
    figures = []
    for text, found in zip(("alone", "behind"), costs, strict=True):
        parts = [statistics.median(part) for part in zip(*found, strict=True)]
        shares = ", ".join(f"{of} {part * 1e6:.0f} us" for of, part in zip(("gateway", "API"), parts, strict=False))
        both = statistics.median(each.both for each in found)
        figures.append(Figure(f"text.{name}_cpu_s_{text}", both, "s", f"{note}, the engine {text}: {shares}"))
        figures.append(Figure(f"text.{name}_cpu_s_{text}_adapter", parts[2], "s", "of the adapter"))
    ratio = statistics.median(theirs.both / ours.both for ours, theirs in zip(*costs, strict=True))
    figures.append(Figure(f"text.{name}_cpu_ratio", ratio, "x", "text by the engine over text by the gateway", goal))
    return figures


def _chats(traffic: Traffic, count: int, max_tokens: int) -> list[bytes]:
    # Greedy: vLLM on a CPU ends when it splits the prompt of a request with a seed.
    return [traffic.chat(PROMPT_TOKENS, max_tokens=max_tokens, stream=True, greedy=True) for _ in range(count)]
