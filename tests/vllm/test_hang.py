"""An engine whose core stands still behind a server that answers: taken out in time, and back only after a token."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import msgpack
import psutil
import pytest

from tests.faults.part import get
from tests.vllm.engines import Engine
from tests.vllm.fleet import LONG_S, Adapter, VllmFleet
from tests.vllm.test_engine_lost import stream, tokens
from tests.waiting import wait_until

HANG_AFTER_S: Final = 20.0
SPARE_S: Final = 5.0
"""On top of it: the time until an idle engine is asked for a token."""
WATCHED_S: Final = 30.0
NUM_TOKENS: Final = 200


def core(engine: Engine) -> psutil.Process:
    """Return the process that generates tokens: the one that has used most of its processor."""
    others = [each for each in engine.family() if each.pid != engine.pid]
    named = [each for each in others if "EngineCore" in " ".join(each.cmdline()) or "EngineCore" in each.name()]
    assert named, [each.cmdline() for each in others]
    return named[0]


def load(adapter: Adapter) -> dict[str, Any]:
    found: dict[str, Any] = msgpack.unpackb(get(f"{adapter.url}/state"))
    return found


def is_out(adapter: Adapter) -> bool:
    return httpx.get(f"{adapter.url}/health/ready", timeout=LONG_S).status_code == 503


def text_of(fleet: VllmFleet, number: int) -> str:
    """Return the text of a greedy stream."""
    text = ""
    with stream(fleet, {"prompt": f"Story {number}:", "max_tokens": NUM_TOKENS}) as response:
        for event in tokens(response):
            assert "error" not in event, event
            text += "".join(choice["text"] for choice in event["choices"])
    return text


@pytest.mark.parametrize("num_streams", [0, 4])
def test_a_core_that_is_stopped(fleet: VllmFleet, num_streams: int) -> None:
    fleet.wait_ready()
    fleet.wait_idle()
    victim = fleet.adapters[0]
    want = [text_of(fleet, number) for number in range(num_streams)]
    stopped = core(victim.engine)
    with ThreadPoolExecutor(max(1, num_streams)) as pool:
        streams = [pool.submit(text_of, fleet, number) for number in range(num_streams)]
        if num_streams:
            wait_until(lambda: victim.engine.metrics() and load(victim)["load"][3] > 0, what="a stream at the victim")
        begun_s = time.monotonic()
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: is_out(victim), LONG_S, "the engine is out")
            took_s = time.monotonic() - begun_s
            assert httpx.get(f"{victim.engine.url}/health", timeout=LONG_S).status_code == 200
            got = [each.result(LONG_S) for each in streams]
            end_s = time.monotonic() + WATCHED_S
            while time.monotonic() < end_s:
                assert is_out(victim), "it comes back without a token"
                time.sleep(0.5)
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
    wait_until(lambda: not is_out(victim), LONG_S, "the engine is back")
    print(f"out after {took_s:.1f} s with {num_streams} streams; {sum(map(len, got))} characters")
    assert took_s <= HANG_AFTER_S + SPARE_S
    assert got == want
    fleet.wait_ready()
