"""The limits of a step, and how its tokens are shared out.

Every running decode gets its token first. What is left goes to prefills, so that a long prompt neither stops the
others nor is stopped by them:

    |<------- half at least: the oldest prefill ------->|<- the other prefills, ->|<- quarter at least: ->|
                                                        |   shortest rest first   |   the waiting         |

A part that its owners do not want goes to the others. A prefill that is alone in the engine may take a larger step:
nobody waits for its end, and large products are faster. Text Generation Inference's options are limits on top.
Source: docs/architecture.md, "The scheduler"; TGI's meanings: docs/architecture.md, "Options of TGI".
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What a step may hold. None: no such limit."""

    max_num_seqs: int = 64
    """Slots: choices that run at the same time."""
    max_num_batched_tokens: int = 2048
    max_solo_prefill_tokens: int | None = None
    """Tokens in a step of one prefill with nobody beside it or behind it; None: as in every other step."""
    max_model_len: int = 4096
    max_waiting_requests: int = 1024
    max_queued_tokens: int = 1 << 20
    """Prompt tokens that may wait, cached ones included."""
    max_queue_s: float = 120.0
    """A request that would wait longer is refused."""
    aging_s: float = 30.0
    """Seconds of waiting that make up for one step of priority."""
    watermark: float = 0.01
    """Part of the pool that an admission must leave free, so that the running ones can grow."""
    await_prefixes: bool = True
    """Whether a sequence waits while a running one computes its prefix: of use when the pool can find it then."""
    max_batch_prefill_tokens: int | None = None
    """TGI: prefill tokens in one step."""
    max_batch_total_tokens: int | None = None
    """TGI: prompt plus max_tokens, over all running choices."""
    waiting_served_ratio: float | None = None
    """TGI: admit only when at least this part of the running number can be admitted together ..."""
    max_waiting_tokens: int = 20
    """TGI: ... unless this many steps have passed without an admission."""

    @property
    def max_contested_slots(self) -> int:
        """Slots that one request may hold while one of another tenant waits: half of them."""
        return max(1, self.max_num_seqs // 2)

    @property
    def max_step_tokens(self) -> int:
        """The longest chunk that any step may hold."""
        return max(self.max_num_batched_tokens, self.max_solo_prefill_tokens or 0)

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "max_waiting_requests",
            "max_queued_tokens",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        solo = self.max_solo_prefill_tokens
        if solo is not None and solo < self.max_num_batched_tokens:
            raise ValueError(
                f"max_solo_prefill_tokens ({solo}) must be at least max_num_batched_tokens"
                f" ({self.max_num_batched_tokens}): a prefill alone gets no less than one among others"
            )
        for name in ("max_batch_prefill_tokens", "max_batch_total_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs"
                f" ({self.max_num_seqs}): every running choice gets a token in every step"
            )
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be in [0, 1), got {self.watermark}")
        if self.waiting_served_ratio is not None and self.waiting_served_ratio < 0.0:
            raise ValueError(f"waiting_served_ratio must not be negative, got {self.waiting_served_ratio}")


@dataclass(slots=True, eq=False)
class PrefillBudget:
    """Prefill tokens left in this step."""

    total: int
    left: int
    most: int | None = None
    """What `total` may come to."""

    @classmethod
    def of_step(cls, limits: BatchLimits, *, num_decodes: int, num_prefills: int) -> PrefillBudget:
        """Beside `num_decodes`, for `num_prefills` that run or wait."""
        total = limits.max_num_batched_tokens - num_decodes
        if num_decodes == 0 and num_prefills == 1 and limits.max_solo_prefill_tokens is not None:
            total = limits.max_solo_prefill_tokens
        if limits.max_batch_prefill_tokens is not None:
            total = min(total, limits.max_batch_prefill_tokens)
        return cls(total, total, limits.max_batch_prefill_tokens)

    @property
    def head_share(self) -> int:
        return max(1, self.total // 2)

    @property
    def newcomer_share(self) -> int:
        return max(1, self.total // 4)

    def take(self, wanted: int, cap: int | None = None) -> int:
        """Tokens granted, at most `wanted`, `cap` and what is left."""
        granted = max(0, min(wanted, self.left if cap is None else min(cap, self.left)))
        self.left -= granted
        return granted

    def give_back(self, num_tokens: int) -> None:
        self.left += num_tokens

    def add_decodes(self, num_decodes: int) -> None:
        """So many decodes have left the step: their tokens are free for prefills."""
        total = self.total + num_decodes if self.most is None else min(self.total + num_decodes, self.most)
        self.left += total - self.total
        self.total = total


@dataclass(slots=True, eq=False)
class AdmissionGate:
    """TGI's rule when the running batch is disturbed by newcomers."""

    limits: BatchLimits
    num_steps_waited: int = 1

    def min_newcomers(self, num_running: int) -> int | None:
        """Admit at least so many sequences or none at all; None: any number."""
        ratio = self.limits.waiting_served_ratio
        if ratio is None or num_running == 0 or self.num_steps_waited >= self.limits.max_waiting_tokens:
            return None
        return math.floor(num_running * ratio)

    def reason(self, num_running: int) -> str:
        """Why a batch of `num_running` grows, in TGI's words."""
        if num_running == 0:
            return "idle"
        if self.limits.waiting_served_ratio is None:
            return "chunking"
        return "backpressure" if self.min_newcomers(num_running) is not None else "wait_exceeded"

    def end_step(self, *, admitted: bool, decoded: bool) -> None:
        """TGI counts its decodes since the last prefill, from 1; a step of ours can be both."""
        self.num_steps_waited = (1 if admitted else self.num_steps_waited) + decoded
