"""A burst waits at the gateway instead of at the workers, and every request is answered."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import SMALL_POOL, Serve, chat
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e
NUM_AT_ONCE = 64


def num_held(serve: Serve) -> float:
    lines = httpx.get(f"{serve.ops_url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("headstart_held_requests{"))


def test_a_burst_is_held_and_answered(tiny_model: Path) -> None:
    """Any wait at a worker is too long, so all but the first requests are held for a moment."""
    arguments = ("--num-workers", "1", "--worker-args", SMALL_POOL, "--gateway-args", "--hold-s 0.0001")
    with Serve("--model", str(tiny_model), *arguments) as serve:
        model = serve.model()

        def ask(number: int) -> int:
            prompt = [{"role": "user", "content": f"{number} " * 100}]
            return chat(serve, prompt, model=model, max_tokens=4).status_code

        with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
            for start in range(0, 20 * NUM_AT_ONCE, NUM_AT_ONCE):
                burst = [pool.submit(ask, number) for number in range(start, start + NUM_AT_ONCE)]
                seen = 0.0
                while not seen and not all(each.done() for each in burst):
                    seen = num_held(serve)
                assert {each.result() for each in burst} == {200}
                if seen:
                    break
        assert seen > 0
        wait_until(lambda: num_held(serve) == 0)
