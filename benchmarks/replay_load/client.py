"""One streamed chat completion, timed: what a client of any OpenAI-compatible server sees."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.replay_load.workload import Turn


@dataclass(frozen=True, slots=True)
class Target:
    """A server under test. `url` is its base without `/v1`."""

    label: str
    url: str
    model: str
    api_key: str = "unused"


@dataclass(slots=True, eq=False)
class Outcome:
    """One request as the client saw it; times are seconds, `started_s` counts from the start of the run."""

    conversation: str
    turn: int
    started_s: float
    ttft_s: float = 0.0
    total_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    """Between one event with tokens and the next."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    worker: str = ""
    """As the server's header names it; empty elsewhere."""
    error: str | None = None

    @property
    def time_per_token_s(self) -> float | None:
        """After the first one; None for an answer of one token."""
        return (self.total_s - self.ttft_s) / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else None


class AnswerError(Exception):
    """The server refused, failed, or ended the stream early."""


class ChatClient:
    """Sends turns to one target. Owns its connections: use it as an async context manager."""

    def __init__(
        self,
        target: Target,
        *,
        max_tokens: int,
        timeout_s: float,
        temperature: float = 0.0,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        """`fields`: further ones of every request."""
        self._fields = fields or {}
        self._target = target
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._began_s = time.perf_counter()

    async def __aenter__(self) -> ChatClient:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=self._timeout,
            headers={"authorization": f"Bearer {self._target.api_key}"},
        )
        self._began_s = time.perf_counter()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def elapsed_s(self) -> float:
        return time.perf_counter() - self._began_s

    async def ask(self, conversation: str, number: int, turn: Turn) -> Outcome:
        """Never raises for what the server does: a failure is an outcome with `error`."""
        outcome = Outcome(conversation, number, self.elapsed_s())
        try:
            await self._stream(turn, outcome)
        except (aiohttp.ClientError, AnswerError, TimeoutError, ValueError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.total_s = self.elapsed_s() - outcome.started_s
        return outcome

    async def _stream(self, turn: Turn, outcome: Outcome) -> None:
        url = f"{self._target.url}/v1/chat/completions"
        async with self._session.post(url, json=self._body(turn)) as response:
            if response.status != 200:
                raise AnswerError(f"{response.status}: {(await response.text())[:300]}")
            outcome.worker = response.headers.get("x-headstart-worker", "")
            last_s: float | None = None
            async for event in _events(response):
                if "error" in event:
                    raise AnswerError(str(event["error"])[:300])
                _count(event, outcome)
                if not _has_tokens(event):
                    continue
                now_s = self.elapsed_s()
                if last_s is None:
                    outcome.ttft_s = now_s - outcome.started_s
                else:
                    outcome.gaps_s.append(now_s - last_s)
                last_s = now_s
            if last_s is None:
                raise AnswerError("the stream ended without a token")

    def _body(self, turn: Turn) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._target.model,
            "messages": list(turn.messages),
            "max_tokens": min(turn.max_tokens or self._max_tokens, self._max_tokens),
            "temperature": self._temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._fields,
        }
        if turn.tools:
            body["tools"] = list(turn.tools)
        return body


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The stream's events. Raises AnswerError when it ends without `[DONE]`."""
    rest = b""
    async for part in response.content.iter_any():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)
    raise AnswerError("the stream ended without [DONE]")


def _has_tokens(event: dict[str, Any]) -> bool:
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("finish_reason") or any(delta.get(key) for key in ("content", "reasoning_content", "tool_calls")):
            return True
    return False


def _count(event: dict[str, Any], outcome: Outcome) -> None:
    usage = event.get("usage")
    if usage:
        outcome.num_prompt_tokens = usage["prompt_tokens"]
        outcome.num_output_tokens = usage["completion_tokens"]
        outcome.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def first_model(url: str, api_key: str) -> str:
    """Return the name of the served model. Raises AnswerError."""
    headers = {"authorization": f"Bearer {api_key}"}
    try:
        async with aiohttp.ClientSession(headers=headers) as session, session.get(f"{url}/v1/models") as response:
            listed = await response.json()
            return str(listed["data"][0]["id"])
    except (aiohttp.ClientError, KeyError, IndexError, TypeError, ValueError) as error:
        raise AnswerError(f"{url}/v1/models names no model ({error}); name it with --model") from error
