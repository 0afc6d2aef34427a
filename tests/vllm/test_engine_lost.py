"""An engine is killed under its streams and started again: nothing hangs, nothing gone is promised.

The only tests that end an engine, so they are the last.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx

from tests.vllm.engines import MODEL
from tests.vllm.fleet import LONG_S, Adapter, VllmFleet, ask, hits
from tests.vllm.test_cache import question, remembered
from tests.waiting import wait_until

FORGET_S: Final = 2.0
"""From the end of an engine to the end of its promises."""
NUM_TOKENS: Final = 64
NUM_BEFORE_KILL: Final = 5


def tokens(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream."""
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def stream(fleet: VllmFleet, body: dict[str, Any]) -> Any:
    body = {"model": MODEL, "stream": True, "temperature": 0, "ignore_eos": True} | body
    return httpx.stream(
        "POST", f"{fleet.gateway.url}/v1/completions", json=body, headers=fleet.headers("red"), timeout=LONG_S
    )


def test_killed_engine(fleet: VllmFleet) -> None:
    """Its stream goes on at the other engine, its promises end, and it comes back with none."""
    known = question()
    victim = remembered(fleet, known)
    body = known | {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    want = fleet.complete(body | {"cache_salt": "undisturbed"}).json()["choices"][0]["text"]
    text, error, forgotten_s = "", None, 0.0
    with stream(fleet, body) as response, ThreadPoolExecutor(1) as pool:
        assert fleet.adapter_of(response) is victim
        for number, event in enumerate(tokens(response)):
            if "error" in event:
                error = event["error"]
                break
            text += "".join(choice["text"] for choice in event["choices"])
            if number == NUM_BEFORE_KILL:
                forgetting = pool.submit(until_forgotten, fleet, known, victim)
                victim.engine.kill()
        forgotten_s = forgetting.result()
    print(f"promises ended {forgotten_s:.2f} s after the kill; the stream is {error or 'whole'}")
    assert text == want if error is None else want.startswith(text)
    epoch = victim.epoch()
    victim.engine.start()
    victim.engine.wait_ready()
    begun_s = time.monotonic()
    fleet.wait_ready()
    print(f"serves again {time.monotonic() - begun_s:.2f} s after the engine, which took {victim.engine.start_s:.0f} s")
    assert fleet.matched(known, victim) == victim.published() == hits(victim.engine) == 0
    ask(victim.engine, known["prompt"])
    wait_until(victim.is_whole, what="the index is whole")
    assert victim.published() > 0
    fleet.complete(known)
    print(f"epochs: {epoch} while it was gone, {victim.epoch()} now")


def until_forgotten(fleet: VllmFleet, known: dict[str, Any], victim: Adapter) -> float:
    """Return how long after the end of the engine its promises end."""
    wait_until(lambda: victim.engine.poll() is not None)
    return fleet.stopwatch().wait_until(lambda: fleet.matched(known, victim) == 0, FORGET_S, "its promises end")
