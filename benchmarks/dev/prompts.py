"""`headstart bench prompts`: what a long prompt costs the gateway: its processor, and how long it holds the loop.

A conversation of many messages, as agents send it, in front of a worker that answers at once. Cold: no message was
seen before. Again: the same body. Next turn: an answer and a question more.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import uvloop

from benchmarks.dev.gateway_load.client import Connection, post
from benchmarks.dev.gateway_load.processes import MODEL, cpu_s, scrape, until_ready
from benchmarks.dev.gateway_load.site import prepare
from benchmarks.dev.gateway_load.traffic import Traffic
from benchmarks.report import Figure, Report, option_parser, publish

CHAT: Final = "/v1/chat/completions"
SIZES: Final = (8_000, 32_000, 128_000)
MESSAGE_TOKENS: Final = 1_000
GOALS: Final = {"128000_next_turn_cpu_s": "<= 0.025", "128000_cold_cpu_s": "<= 0.4", "128000_cold_loop_s": "<= 0.05"}


@dataclass(frozen=True, slots=True)
class Cost:
    cpu_s: float
    loop_s: float
    """The longest time that the event loop was held."""


class Front:
    """The gateway that is measured."""

    def __init__(self, url: str, ops: str, pid: int, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._ops = ops
        self._pid = pid
        self._session = session

    async def ask(self, body: bytes) -> Cost:
        """Send one request, and return what it cost."""
        connection = await Connection.open(self._url)
        await self._longest_delay_s()  # begins a new maximum
        begun_s = cpu_s(self._pid)
        await connection.ask(post(self._url + CHAT, body))
        cost = Cost(cpu_s(self._pid) - begun_s, await self._longest_delay_s())
        connection.transport.close()
        return cost

    async def _longest_delay_s(self) -> float:
        return (await scrape(self._session, self._ops))["headstart_event_loop_longest_delay_seconds"]


def main(argv: Sequence[str]) -> int:
    parser = option_parser("prompts", "What a long prompt costs the gateway.")
    parser.add_argument("--conversations", type=int, default=7, help="of each size; the median counts (default 7)")
    options = parser.parse_args(argv)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, ExitStack() as stack:
        figures = runner.run(_measure(stack, options.conversations))
    publish(Report("prompts", figures, {"conversations": options.conversations}), options)
    return 0


async def _measure(stack: ExitStack, num_conversations: int) -> list[Figure]:
    site = await prepare(stack, max_model_len=2 * max(SIZES))
    stub = stack.enter_context(site.stub())
    url, ops, pid = stack.enter_context(site.gateway(stub))
    await until_ready(url)
    figures = []
    async with aiohttp.ClientSession() as session:
        front = Front(url, ops, pid, session)
        await front.ask(site.traffic.chat(200))
        for num_tokens in SIZES:
            costs: dict[str, list[Cost]] = {"cold": [], "again": [], "next_turn": []}
            for _ in range(num_conversations):
                messages = conversation(site.traffic, num_tokens)
                for name in ("cold", "again"):
                    costs[name].append(await front.ask(_body(messages)))
                messages += _turn(site.traffic)
                costs["next_turn"].append(await front.ask(_body(messages)))
            for name, found in costs.items():
                figures += _figures(f"{num_tokens}_{name}", found)
    return figures


def conversation(traffic: Traffic, num_tokens: int) -> list[dict[str, Any]]:
    """Return messages of about `num_tokens` in all, the user's and the assistant's in turn."""
    roles = ("user", "assistant")
    count = max(1, num_tokens // MESSAGE_TOKENS) | 1
    return [{"role": roles[n % 2], "content": traffic.text(num_tokens // count)} for n in range(count)]


def _turn(traffic: Traffic) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": traffic.text(200)}, {"role": "user", "content": traffic.text(100)}]


def _body(messages: Sequence[dict[str, Any]]) -> bytes:
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 1, "temperature": 0}).encode()


def _figures(name: str, costs: Sequence[Cost]) -> list[Figure]:
    cpu, loop = f"{name}_cpu_s", f"{name}_loop_s"
    median_s, longest_s = statistics.median(cost.cpu_s for cost in costs), max(cost.loop_s for cost in costs)
    return [
        Figure(cpu, median_s, "s", "of the gateway's processor, the median", GOALS.get(cpu, "")),
        Figure(loop, longest_s, "s", "the longest that the loop was held", GOALS.get(loop, "")),
    ]
