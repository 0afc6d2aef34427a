"""Load on a fleet, by OpenAI's client."""

from __future__ import annotations

import threading
from collections import Counter

from tests.k8s.fleet import Fleet
from tests.k8s.podman import Container
from tests.waiting import HANG_S, wait_until

PROMPT = "Once upon a time there was a gateway that knew which worker held which block. " * 6


class Load:
    """Clients that never pause: half of them stream. Each takes the gateways that are in rotation in turn."""

    def __init__(self, fleet: Fleet, num_clients: int = 6) -> None:
        self._fleet = fleet
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(num_clients)]
        self.failures: list[str] = []
        self.answers: Counter[str] = Counter()

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=2 * HANG_S)
        assert not any(thread.is_alive() for thread in self._threads), "a request hangs"

    def wait_for(self, num_answers: int) -> None:
        """Wait for `num_answers` further answers."""
        target = self.answers.total() + num_answers
        wait_until(lambda: self.answers.total() >= target, what=f"{num_answers} more answers")

    def _run(self, number: int) -> None:
        turn = number
        while not self._stop.is_set():
            turn += 1
            gateway = self._fleet.in_rotation[turn % len(self._fleet.in_rotation)]
            try:
                self._ask(gateway, f"Client {number} asks for the {turn}th time: {PROMPT}", stream=number % 2 == 0)
                self.answers[gateway.name] += 1
            except Exception as error:
                self.failures.append(f"{gateway.name}: {type(error).__name__}: {error}")

    def _ask(self, gateway: Container, prompt: str, *, stream: bool) -> None:
        with self._fleet.client(gateway) as client:
            options = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0}
            if not stream:
                answer = client.completions.create(**options, extra_body={"ignore_eos": True})
                assert answer.usage is not None
                assert answer.usage.completion_tokens == 24, answer
                return
            usage = None
            chunks = client.completions.create(
                **options, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}
            )
            for chunk in chunks:
                usage = chunk.usage or usage
            assert usage is not None
            assert usage.completion_tokens == 24, usage
