"""Agents' streams under engines that are killed at random moments: each is whole and right, or ends with an error.

Plain content goes on at the other engine; thoughts and calls do not.
`pytest -m vllm -k two_hundred tests/vllm/test_lost_streams.py` runs 200 of them, in 20 minutes.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import httpx
import pytest

from tests.json_texts import texts
from tests.vllm import horizon
from tests.vllm.bodies import FUNCTION, PARAMETERS
from tests.vllm.engines import MODEL
from tests.vllm.fleet import LONG_S, VllmFleet
from tests.vllm.test_engine_lost import tokens
from tests.vllm.test_engine_text import user
from tests.waiting import wait_until

NUM_STREAMS: Final = 8
"""As many are open at a kill."""
SYSTEM: Final = "You are a careful agent. Read the files, then edit them, and say what you have done. " * 12
CITIES: Final = ("Rome", "São Paulo", "東京", "🙂 and a\ttab", '"quoted"')
NAMES: Final = frozenset({"content", "reasoning", "text", "thinking", "arguments", "partial_json", "delta", "name"})
"""Fields of events that hold text of the answer."""


class Answer(NamedTuple):
    """The part of a stream that an agent has read."""

    worker: str
    text: str
    """All texts of its events, in order."""
    error: str
    """Empty: the stream is whole."""


def turn(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """Return the path and body of a completion, or of a request with tools to another API."""
    asked = f"{chance.getrandbits(32)}: what is the weather in {chance.choice(CITIES)}?"
    match chance.choice(("calls", "completion", "messages", "responses")):
        case "calls":
            text = horizon.THINK.format("I look it up. " * 9) + "Let me see the weather there. " * 6
            text += horizon.calls([("get_weather", {"city": each}) for each in chance.sample(CITIES, 2)])
            body = {"messages": [{"role": "system", "content": SYSTEM}, *user(asked)], "max_tokens": 400}
            body |= {"tools": [{"type": "function", "function": FUNCTION}], "structured_outputs": {"choice": [text]}}
            return "/v1/chat/completions", body
        case "completion":
            return "/v1/completions", {"prompt": SYSTEM + asked, "max_tokens": 150, "ignore_eos": True}
        case "messages":
            tool = {"name": "get_weather", "description": "Tells the weather.", "input_schema": PARAMETERS}
            return "/v1/messages", {"system": SYSTEM, "messages": user(asked), "tools": [tool], "max_tokens": 150}
        case _:
            body = {"instructions": SYSTEM, "input": asked, "max_output_tokens": 150, "ignore_eos": True}
            return "/v1/responses", body | {"tools": [{"type": "function"} | FUNCTION]}


def read(fleet: VllmFleet, path: str, body: dict[str, Any], seen: list[dict[str, Any]]) -> Answer:
    """Return a stream's answer; each event is added to `seen`."""
    body = {"model": MODEL, "stream": True, "temperature": 0} | body
    url, headers = fleet.gateway.url + path, fleet.headers("red")
    text = error = ""
    with httpx.stream("POST", url, json=body, headers=headers, timeout=LONG_S) as answer:
        assert answer.status_code == 200, answer.read()
        for event in tokens(answer):
            if event.get("error") or event.get("type") in ("error", "response.failed"):
                error = json.dumps(event)
            elif not error:
                text += "".join(texts(event, NAMES))
            seen.append(event)
        return Answer(answer.headers["x-headstart-worker"], text, error)


@pytest.mark.parametrize("num_rounds", [1, pytest.param(25, marks=pytest.mark.deep, id="two_hundred")])
def test_streams_under_kills(horizon_fleet: VllmFleet, num_rounds: int) -> None:
    fleet, chance, ends = horizon_fleet, random.Random(num_rounds), Counter[str]()
    for _ in range(num_rounds):
        turns = [turn(chance) for _ in range(NUM_STREAMS)]
        seen: list[dict[str, Any]] = []
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            wanted = list(pool.map(lambda each: read(fleet, *each, []), turns))
            pending = [pool.submit(read, fleet, *each, seen) for each in turns]
            num_seen, victim = chance.randrange(300), chance.randrange(2)
            wait_until(lambda: len(seen) > num_seen or all(each.done() for each in pending))  # noqa: B023
            fleet.engines[victim].kill()
            answers = [each.result() for each in pending]
        for (path, body), want, got in zip(turns, wanted, answers, strict=True):
            assert not want.error, want
            assert got.text == want.text if not got.error else want.text.startswith(got.text), (body, want, got)
            was_lost = got.worker == fleet.adapters[victim].name
            assert was_lost or not got.error, (body, got)
            ends[f"{path}: {'error' if got.error else 'whole'}{' at the killed engine' if was_lost else ''}"] += 1
        fleet.engines[victim].start()
        fleet.engines[victim].wait_ready()
        fleet.wait_ready()
    print(*(f"{count} {end}" for end, count in sorted(ends.items())), sep="\n")
    print(f"{fleet.gateway.metrics().get('headstart_resumed_total', 0):.0f} went on at the other engine")
