"""The limits of a step, and how its tokens are shared out.

Every running decode gets its token first. Prefills share the rest, so that a long prompt neither delays nor starves:

    |<----- at least half: the oldest prefill ----->|<- the other prefills, ->|<- at least a quarter: ->|
                                                    |   shortest first        |   admitted sequences    |

Tokens that one share leaves go to the others. A prefill may take a larger step, which is more efficient, if no other
sequence runs or waits.
Source: docs/architecture/worker.md, "The scheduler".
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits on the batch. The options have checked the single numbers. None: no such limit."""

    max_num_seqs: int = 64
    """Choices that run at the same time."""
    max_num_batched_tokens: int = 2048
    max_solo_prefill_tokens: int | None = None
    """Tokens in a step of a single prefill, with no decode and nothing waiting; None: as in every other step."""
    aging_s: float = 30.0
    """Waiting time equivalent to one priority level."""
    watermark: float = 0.01
    """Part of the pool that an admission must leave free, for the running sequences to grow."""
    await_prefixes: bool = True
    """A sequence waits while a running one computes its prefix."""
    max_batch_prefill_tokens: int | None = None
    """TGI: prefill tokens in one step."""
    max_batch_total_tokens: int | None = None
    """TGI: prompt plus max_tokens, over all running choices."""
    waiting_served_ratio: float | None = None
    """TGI: admit only when at least this part of the running number can be admitted together ..."""
    max_waiting_tokens: int = 20
    """TGI: ... unless this many steps have passed without an admission."""

    @property
    def max_contested_choices(self) -> int:
        """Choices of one request that may run while another tenant waits: half of the most."""
        return max(1, self.max_num_seqs // 2)

    @property
    def max_step_tokens(self) -> int:
        return max(self.max_num_batched_tokens, self.max_solo_prefill_tokens or 0)

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs"
                f" ({self.max_num_seqs}): every running choice gets a token in every step"
            )


@dataclass(slots=True, eq=False)
class PrefillBudget:
    """The prefill tokens of one step: `left` of `total`."""

    total: int
    left: int
    max_total: int | None = None

    @classmethod
    def for_step(cls, limits: BatchLimits, *, num_decodes: int, num_prefills: int) -> PrefillBudget:
        """Count `num_prefills` running and waiting."""
        total = limits.max_num_batched_tokens - num_decodes
        if num_decodes == 0 and num_prefills == 1 and limits.max_solo_prefill_tokens is not None:
            total = limits.max_solo_prefill_tokens
        if limits.max_batch_prefill_tokens is not None:
            total = min(total, limits.max_batch_prefill_tokens)
        return cls(total, total, limits.max_batch_prefill_tokens)

    @property
    def oldest_share(self) -> int:
        return max(1, self.total // 2)

    @property
    def admission_share(self) -> int:
        return max(1, self.total // 4)

    def take(self, wanted: int, cap: int | None = None) -> int:
        """Grant tokens: at most `wanted`, and what `cap` and the rest allow."""
        granted = max(0, min(wanted, self.left if cap is None else min(cap, self.left)))
        self.left -= granted
        return granted

    def give_back(self, num_tokens: int) -> None:
        self.left += num_tokens

    def drop_decode(self) -> None:
        """Give the token of a decode that has left the step to the prefills."""
        if self.max_total is None or self.total < self.max_total:
            self.total += 1
            self.left += 1
