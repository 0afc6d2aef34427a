"""Routers head to head: the same recorded tool conversations over the same engines, in rounds that alternate."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from tokenizers import Tokenizer

from benchmarks.dev.engines_load.routers import Router
from benchmarks.dev.engines_load.vllm import BLOCK_SIZE, Engine
from benchmarks.dev.gateway_load.processes import MODEL
from benchmarks.replay_load.client import ChatClient, Outcome, Target
from benchmarks.replay_load.driver import Pace, drive
from benchmarks.replay_load.workload import Conversation, Message, Turn
from benchmarks.report import Figure, percentile

SETTLE_S: Final = 2.0
"""For the events of the reset to reach whoever listens."""
START_TIMEOUT_S: Final = 180.0
REQUEST_TIMEOUT_S: Final = 300.0
CACHED: Final = "vllm:prompt_tokens_cached_total"


@dataclass(frozen=True, slots=True)
class Result:
    """One router in one round."""

    outcomes: Sequence[Outcome]
    duration_s: float
    cached_tokens: float
    """By the engines' own counters."""

    @property
    def ttft_mean_s(self) -> float:
        return statistics.fmean(outcome.ttft_s for outcome in self.outcomes)

    @property
    def ttft_p99_s(self) -> float:
        return percentile((outcome.ttft_s for outcome in self.outcomes), 0.99)


def as_text(conversation: Conversation) -> Conversation:
    """Return the conversation with tool calls as text, and their results as the user's: every template takes these."""
    turns = [Turn([_plain(message) for message in turn.messages], turn.max_tokens) for turn in conversation.turns]
    return Conversation(conversation.name, turns)


def _plain(message: Message) -> dict[str, Any]:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    content = (message.get("content") or "") + (json.dumps(calls) if calls else "")
    role = "user" if message["role"] == "tool" else message["role"]
    return {"role": role, "content": content or "(empty)"}  # sglang-router refuses a message without text


def num_blocks(conversations: Sequence[Conversation], tokenizer: Tokenizer) -> int:
    """Count the different blocks of all prompts: what one pool would have to hold to evict nothing."""
    found = set()
    for conversation in conversations:
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in conversation.turns[-1].messages)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        chain = 0
        for start in range(0, len(ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
            chain = hash((chain, *ids[start : start + BLOCK_SIZE]))
            found.add(chain)
    return len(found)


async def compare(
    routers: Sequence[Router],
    engines: Sequence[Engine],
    conversations: Sequence[Conversation],
    *,
    rounds: int,
    concurrency: int,
    max_tokens: int,
) -> dict[str, list[Result]]:
    """Return every router's result of each round. Each round begins with another router, and with empty caches."""
    results: dict[str, list[Result]] = {router.name: [] for router in routers}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)) as session:
        for number in range(rounds):
            first = number % len(routers)
            for router in (*routers[first:], *routers[:first]):
                result = await _one(router, session, engines, conversations, concurrency, max_tokens)
                results[router.name].append(result)
                print(f"round {number + 1}: {_line(router, result)}", file=sys.stderr, flush=True)
    return results


async def _one(
    router: Router,
    session: aiohttp.ClientSession,
    engines: Sequence[Engine],
    conversations: Sequence[Conversation],
    concurrency: int,
    max_tokens: int,
) -> Result:
    with router.opened(engines) as url:
        await _until_answering(url, session)
        for engine in engines:
            await engine.reset(session, MODEL)
        await asyncio.sleep(SETTLE_S)
        before, began_s = await _cached_tokens(engines, session), time.monotonic()
        target = Target(router.name, url, MODEL)
        async with ChatClient(target, max_tokens=max_tokens, timeout_s=REQUEST_TIMEOUT_S) as client:
            outcomes = await drive(client, conversations, Pace(concurrency), lambda: None)
        failed = [outcome.error for outcome in outcomes if outcome.error is not None]
        if failed:
            raise SystemExit(f"{router.name}: {len(failed)} of {len(outcomes)} requests failed: {failed[0]}")
        return Result(outcomes, time.monotonic() - began_s, await _cached_tokens(engines, session) - before)


async def _cached_tokens(engines: Sequence[Engine], session: aiohttp.ClientSession) -> float:
    return sum([(await engine.counters(session))[CACHED] for engine in engines])


async def _until_answering(url: str, session: aiohttp.ClientSession) -> None:
    """A request sent now is answered: each router is ready in its own way."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                if response.status == 200:
                    return
        if time.monotonic() > deadline_s:
            raise SystemExit(f"the router at {url} does not serve")
        await asyncio.sleep(0.5)


def _line(router: Router, result: Result) -> str:
    return (
        f"{router.name:22} {len(result.outcomes)} requests in {result.duration_s:.0f} s, "
        f"mean {result.ttft_mean_s:.3f} s, p99 {result.ttft_p99_s:.3f} s, {result.cached_tokens:,.0f} tokens cached"
    )


def figures(results: dict[str, list[Result]]) -> list[Figure]:
    """Return the medians over the rounds."""
    found = []
    for name, rounds in results.items():
        means, p99s = [result.ttft_mean_s for result in rounds], [result.ttft_p99_s for result in rounds]
        cached = [result.cached_tokens for result in rounds]
        asked = sum(outcome.num_prompt_tokens for outcome in rounds[0].outcomes)
        note = f"median of {len(rounds)} rounds of {len(rounds[0].outcomes)} requests"
        goals = ("best", "<= 1.05 x best", "best") if name == "headstart" else ("", "", "")
        found += [
            Figure(f"{name}.ttft_mean_s", statistics.median(means), "s", f"{note}, {_spread(means)}", goals[0]),
            Figure(f"{name}.ttft_p99_s", statistics.median(p99s), "s", _spread(p99s), goals[1]),
            Figure(f"{name}.cached_tokens", statistics.median(cached), "", f"of {asked:,}", goals[2]),
        ]
    return found


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}"
