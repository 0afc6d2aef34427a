"""A client that remembers everything: text, token ids and logprobs of every choice, how the answer ended, and when."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from tests.waiting import HANG_S

TIMEOUT_S: Final = 2 * HANG_S


@dataclass(slots=True)
class ChoiceText:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None


def close(one: Any, other: Any) -> bool:
    """Equal but for the last digits of floats: a batch of another shape rounds otherwise."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 1e-3
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(close, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(close(value, other[key]) for key, value in one.items())
    return bool(one == other)


@dataclass(slots=True)
class Outcome:
    """How one request ended. `error`: the code of an error answer or event; "cut": the connection ended without one."""

    status: int = 0
    choices: dict[int, ChoiceText] = field(default_factory=dict)
    error: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    took_s: float = 0.0
    ttft_s: float = 0.0
    done: bool = False
    """[DONE] was seen, or the body was whole."""

    @property
    def ok(self) -> bool:
        return self.status == 200 and self.error is None and self.done

    def same_as(self, other: Outcome) -> bool:
        """The same choices to the last token, character and finish reason, and logprobs but for their rounding."""
        if not (self.ok and other.ok and self.choices.keys() == other.choices.keys()):
            return False
        pairs = ((choice, other.choices[index]) for index, choice in self.choices.items())
        return all(
            (a.text, a.token_ids, a.finish_reason) == (b.text, b.token_ids, b.finish_reason)
            and close(a.logprobs, b.logprobs)
            for a, b in pairs
        )

    @property
    def explicit(self) -> bool:
        """Return whether the server reported the error itself."""
        return self.error is not None and self.error != "cut"

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices.values())


def session(*, keep_alive: bool = False) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=not keep_alive),
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
    )


def completion(prompt: str, **options: Any) -> dict[str, Any]:
    """A streamed completion's body that runs to its max_tokens."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 48, "temperature": 0, "stream": True}
    return body | {"ignore_eos": True, "return_token_ids": True} | options


async def ask(
    http: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    *,
    headers: dict[str, str] | None = None,
    on_tokens: Any = None,
) -> Outcome:
    """Send `body` to /v1/completions, or to /v1/chat/completions if it has messages. Never raises for what is
    answered or not; `on_tokens(outcome)` is called after every event."""
    outcome = Outcome()
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    begun_s = time.monotonic()
    try:
        async with http.post(url + path, json=body, headers=headers) as response:
            outcome.status = response.status
            outcome.headers = {name.lower(): value for name, value in response.headers.items()}
            if response.status != 200:
                outcome.error = _code(await response.json(content_type=None))
            elif body.get("stream"):
                await _read_events(response, outcome, begun_s, on_tokens)
            else:
                _take_body(await response.json(), outcome)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        outcome.error = outcome.error or ("timeout" if isinstance(error, TimeoutError) else "cut")
    outcome.took_s = time.monotonic() - begun_s
    return outcome


def _code(body: Any) -> str:
    return str(body["error"]["code"] or body["error"]["type"])


async def _read_events(response: aiohttp.ClientResponse, outcome: Outcome, begun_s: float, on_tokens: Any) -> None:
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        if line == b"data: [DONE]\n":
            outcome.done = True
            continue
        assert not outcome.done, "an event after [DONE]"
        event = json.loads(line[6:])
        if "error" in event:
            outcome.error = _code(event)
            continue
        outcome.usage = event.get("usage") or outcome.usage
        for choice in event["choices"]:
            _take_choice(choice, outcome, choice.get("delta"))
        if not outcome.ttft_s and outcome.num_tokens:
            outcome.ttft_s = time.monotonic() - begun_s
        if on_tokens is not None:
            on_tokens(outcome)
    if not outcome.done and outcome.error is None:
        outcome.error = "cut"


def _take_choice(choice: dict[str, Any], outcome: Outcome, message: dict[str, Any] | None) -> None:
    known = outcome.choices.setdefault(choice["index"], ChoiceText())
    known.text += (choice.get("text") if message is None else message.get("content")) or ""
    known.token_ids += choice.get("token_ids") or []
    if logprobs := choice.get("logprobs"):
        known.logprobs += logprobs.get("content") or logprobs.get("token_logprobs") or []
    if choice.get("finish_reason"):
        assert known.finish_reason is None, "a choice finished twice"
        known.finish_reason = choice["finish_reason"]


def _take_body(body: dict[str, Any], outcome: Outcome) -> None:
    outcome.usage = body.get("usage")
    outcome.done = True
    for choice in body["choices"]:
        _take_choice(choice, outcome, choice.get("message"))


async def ask_all(
    url: str, bodies: list[dict[str, Any]], *, parallel: int = 64, on_tokens: Any = None
) -> list[Outcome]:
    """Send all bodies, `parallel` at a time; return the outcomes in their order."""
    gate = asyncio.Semaphore(parallel)
    async with session() as http:

        async def one(body: dict[str, Any]) -> Outcome:
            async with gate:
                return await ask(http, url, body, on_tokens=on_tokens)

        return list(await asyncio.gather(*map(one, bodies)))
