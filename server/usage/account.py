"""The use of one request: its line in the usage log.

queue_s            waits of a prompt for its prefill, at the gateway and at workers; again after each lost worker
wire_s             from sending the prompt to the report of its prefill, without queue_s: network and two processes
prefill_s          uncached prompt tokens over the worker's measured rate, as the gateway had it at the placement
prefill_saved_s    cached prompt tokens over the same rate
block_s            blocks of the prompt and of all its answers x the time from its prefill to its end at workers
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct, field

CLIENT_LEFT: Final = 499  # nginx's status for a client that closed its connection


class Account(Struct, eq=False, kw_only=True):
    """The use of one request. Its endpoint fills it in; `with_context` hands it on at the end."""

    ended_at: float = 0.0
    """Unix time."""
    request_id: str = ""
    tenant: str
    key: str
    """The key's name, or the first 12 digits of its digest; empty without keys."""
    model: str = ""
    route: str
    status: int = 0
    """0: the response never began; 499: the client left."""
    finished: bool = False
    """Every choice has ended."""
    num_prompts: int = 0
    num_choices: int = 0
    prompt_tokens: int = 0
    """Tokens of the prompts whose prefill has begun."""
    cached_tokens: dict[str, int] = field(default_factory=dict)
    """Prompt tokens that a worker found cached, by place."""
    output_tokens: int = 0
    queue_s: float = 0.0
    wire_s: float = 0.0
    prefill_s: float = 0.0
    prefill_saved_s: float = 0.0
    block_s: float = 0.0
    seconds: float = 0.0
    """From the first byte of the request to the last of the answer."""
    worker: str = ""
    """The worker of the request; for several prompts their workers, joined by commas."""
    first_token_s: float | None = None
    """From the arrival of the request to the first token; None: it was not streamed, or had none."""
    error: str = ""
    """The code of the error that ended it; empty: none did."""

    @property
    def num_cached_tokens(self) -> int:
        return sum(self.cached_tokens.values())

    def add_cached(self, num_tokens: int, fetched: Mapping[str, int]) -> None:
        """Add cached tokens; `fetched`: those that were not in the pool, by place."""
        cached = self.cached_tokens
        cached["pool"] = cached.get("pool", 0) + max(0, num_tokens - sum(fetched.values()))
        for place, num_fetched in fetched.items():
            cached[place] = cached.get(place, 0) + num_fetched

    def sums(self) -> dict[str, float]:
        """Return what is added up over requests; cached tokens also by place."""
        return {
            "requests": 1,
            "unfinished": int(not self.finished),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "output_tokens": self.output_tokens,
            "queue_s": self.queue_s,
            "wire_s": self.wire_s,
            "prefill_s": self.prefill_s,
            "prefill_saved_s": self.prefill_saved_s,
            "block_s": self.block_s,
            **self.cached_tokens,
        }

    def end(self, request_id: str, status: int, elapsed_s: float, error: str) -> None:
        """Complete the account, with times rounded to what a line of the log shows."""
        self.ended_at = round(time.time(), 3)
        self.request_id = request_id
        self.status = status
        self.error = error
        self.seconds = round(elapsed_s, 6)
        self.queue_s, self.wire_s, self.block_s = round(self.queue_s, 6), round(self.wire_s, 6), round(self.block_s, 6)
        self.prefill_s, self.prefill_saved_s = round(self.prefill_s, 6), round(self.prefill_saved_s, 6)
        self.first_token_s = None if self.first_token_s is None else round(self.first_token_s, 6)


class PromptTimes:
    """The times of one prompt: in queues, on the wire, and with blocks at a worker."""

    __slots__ = ("_clock", "_is_waiting", "_since_s", "fixed_s", "held_s", "queue_s", "tokens_per_s", "wire_s")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s: float | None = None
        """When the present state began; None before the first and after the last."""
        self._is_waiting = True
        self.queue_s = 0.0
        self.wire_s = 0.0
        self.held_s = 0.0
        self.tokens_per_s = self.fixed_s = 0.0
        """The prefill rate of the worker that computed the prompt, 0.0: none has begun; and its fixed part."""

    def wait(self) -> None:
        """Begin to wait. Call it before the choice of a worker, at each sending, and when a worker is lost."""
        now_s = self._clock()
        elapsed_s = 0.0 if self._since_s is None else now_s - self._since_s
        if self._is_waiting:
            self.queue_s += elapsed_s
        else:
            self.held_s += elapsed_s
        self._since_s, self._is_waiting = now_s, True

    def start(self, tokens_per_s: float, fixed_s: float, queue_s: float | None = None) -> None:
        """Begin the prefill, at a worker of these measures, after `queue_s` in its queue. None: not reported."""
        if queue_s is not None and self._is_waiting and self._since_s is not None:
            wire_s = max(0.0, self._clock() - self._since_s - queue_s)
            self.wire_s += wire_s
            self._since_s += wire_s
        self.wait()  # ends the state before
        self._is_waiting = False
        if not self.tokens_per_s:
            self.tokens_per_s, self.fixed_s = tokens_per_s, fixed_s

    def stop(self) -> None:
        """End the present state, if any."""
        self.wait()
        self._since_s = None
