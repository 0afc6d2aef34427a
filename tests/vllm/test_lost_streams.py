"""Agents' streams under engines that are killed at random moments: each is whole and right, or ends with an error.

`pytest -m vllm -k two_hundred tests/vllm/test_lost_streams.py` runs 200 of them, in 20 minutes.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import httpx
import pytest

from tests.vllm import horizon
from tests.vllm.bodies import FUNCTION, PARAMETERS
from tests.vllm.engines import MODEL
from tests.vllm.fleet import LONG_S, VllmFleet
from tests.waiting import wait_until

pytestmark = pytest.mark.vllm
NUM_STREAMS: Final = 8
"""As many are open at a kill."""
SYSTEM: Final = "You are a careful agent. Read the files, then edit them, and say what you have done. " * 12
CITIES: Final = ("Rome", "São Paulo", "東京", "🙂 and a\ttab", '"quoted"')
_TEXTS: Final = frozenset({"content", "reasoning", "text", "thinking", "arguments", "partial_json", "delta", "name"})


class Turn(NamedTuple):
    """A request of an agent."""

    path: str
    body: dict[str, Any]


class Answer(NamedTuple):
    """The part of a stream that an agent has read."""

    worker: str
    text: str
    """All texts of its events, in order."""
    error: str
    """Empty: the stream is whole."""


def turns(chance: random.Random) -> Iterator[Turn]:
    """Yield requests of the three APIs with tools: answers of text, or of thoughts, text and calls."""
    while True:
        city, number = chance.choice(CITIES), chance.getrandbits(32)
        asked = f"{number}: what is the weather in {city}?"
        said = [{"role": "user", "content": asked}]
        match chance.choice(("calls", "chat", "messages", "responses")):
            case "calls":
                text = horizon.THINK.format("I look it up. " * 9) + f"Let me see the weather in {city}. " * 6
                text += horizon.calls([("get_weather", {"city": each}) for each in chance.sample(CITIES, 2)])
                body = chat(said) | {"max_tokens": 400, "structured_outputs": {"choice": [text]}}
                yield Turn("/v1/chat/completions", body)
            case "chat":
                yield Turn("/v1/chat/completions", chat(said) | {"max_tokens": 150, "ignore_eos": True})
            case "messages":
                tool = {"name": "get_weather", "description": "Tells the weather.", "input_schema": PARAMETERS}
                yield Turn("/v1/messages", {"system": SYSTEM, "messages": said, "tools": [tool], "max_tokens": 150})
            case "responses":
                body = {"instructions": SYSTEM, "input": asked, "max_output_tokens": 150, "ignore_eos": True}
                yield Turn("/v1/responses", body | {"tools": [{"type": "function"} | FUNCTION]})


def chat(said: list[dict[str, Any]]) -> dict[str, Any]:
    tools = [{"type": "function", "function": FUNCTION}]
    return {"messages": [{"role": "system", "content": SYSTEM}, *said], "tools": tools}


def texts(value: Any, name: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from texts(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from texts(item, name)
    elif isinstance(value, str) and name in _TEXTS:
        yield value


def read(fleet: VllmFleet, turn: Turn, seen: list[str]) -> Answer:
    """Return a stream's answer; each event is added to `seen`."""
    body = {"model": MODEL, "stream": True, "temperature": 0} | turn.body
    url, headers = fleet.gateway.url + turn.path, fleet.headers("red")
    text = error = ""
    with httpx.stream("POST", url, json=body, headers=headers, timeout=LONG_S) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if event.get("error") or event.get("type") in ("error", "response.failed"):
                    error = line
                elif not error:
                    text += "".join(texts(event))
                seen.append(line)
        return Answer(answer.headers["x-headstart-worker"], text, error)


@pytest.mark.parametrize("num_rounds", [1, pytest.param(25, marks=pytest.mark.deep, id="two_hundred")])
def test_streams_under_kills(horizon_fleet: VllmFleet, num_rounds: int) -> None:
    fleet, chance = horizon_fleet, random.Random(num_rounds)
    requests, ends = turns(chance), Counter[str]()
    for _ in range(num_rounds):
        some = [next(requests) for _ in range(NUM_STREAMS)]
        seen: list[str] = []
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            wanted = list(pool.map(lambda turn: read(fleet, turn, []), some))
            pending = [pool.submit(read, fleet, turn, seen) for turn in some]
            num_seen, victim = chance.randrange(300), chance.randrange(2)
            wait_until(lambda: len(seen) > num_seen or all(each.done() for each in pending))  # noqa: B023
            fleet.engines[victim].kill()
            answers = [each.result() for each in pending]
        for turn, want, got in zip(some, wanted, answers, strict=True):
            assert not want.error, want
            assert got.text == want.text if not got.error else want.text.startswith(got.text), (turn, want, got)
            was_lost = got.worker == fleet.adapters[victim].name
            assert was_lost or not got.error, (turn, got)
            ends[f"{turn.path}: {'error' if got.error else 'whole'}{' at the killed engine' if was_lost else ''}"] += 1
        fleet.engines[victim].start()
        fleet.engines[victim].wait_ready()
        fleet.wait_ready()
    print(*(f"{count} {end}" for end, count in sorted(ends.items())), sep="\n")
