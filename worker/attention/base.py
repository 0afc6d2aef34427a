"""The interface of every attention backend, and the batch that goes through it.

A batch is the tokens of several sequences laid end to end. Decodes (one token) come first, sorted by context length;
prefill chunks follow.

    tokens   | d0 | d1 | d2 | c0 c0 c0 c0 c0 c0 | c1 c1 c1 |
    spans      1    1    1    6 tokens            3 tokens
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from msgspec import Struct
from torch import Tensor

DECODE_ROWS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Decodes of a step on a GPU are padded to one of these: each one means compiled kernels and a recorded graph."""
CONTEXTS: Final = (2048, 16384, 131072)
"""Context lengths that decodes on a GPU are padded to. Several, as a kernel for long contexts is slow on short ones."""


def padded(size: int, sizes: Sequence[int]) -> int:
    """Return the smallest of the ascending `sizes` that holds `size`; beyond them, a multiple of the last."""
    if size <= sizes[-1]:
        return sizes[bisect_left(sizes, size)]
    return -(-size // sizes[-1]) * sizes[-1]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The dimensions of a model's attention."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor on query-key products."""
    windows: tuple[int | None, ...] = ()
    """Per layer: how many tokens a query sees, itself included, or None for all. Empty: all, everywhere."""

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def longest_window(self) -> int | None:
        """Return the longest window of all layers. None: a layer sees everything."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if windows and len(windows) == len(self.windows) else None

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None


class Span(Struct, frozen=True, gc=False):
    """Consecutive tokens of one sequence. Each query sees all tokens of the sequence up to itself."""

    start: int
    """Tokens of the sequence before this span, whose KV is in the pool."""
    num_tokens: int
    block_table: Sequence[int]
    """Covers all `stop` tokens."""

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


def num_leading_decodes(spans: Sequence[Span]) -> int:
    """Return the number of decodes of a batch."""
    return next((row for row, span in enumerate(spans) if span.num_tokens > 1), len(spans))


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tensors of one forward. The attention prepares `plan`, which is the same for every layer."""

    token_ids: Tensor
    """(num_tokens,) int64"""
    positions: Tensor
    """(num_tokens,) int64"""
    slots: Tensor
    """(num_tokens,) int64: where the KV of each token is written"""
    plan: object


class Attention(Protocol):
    """Paged causal attention over one KV pool. Each layer writes the step's K and V before it reads."""

    @property
    def name(self) -> str: ...

    def plan(self, spans: Sequence[Span]) -> object:
        """Prepare, once for a step, what every layer needs. The order of spans is that of the module docstring."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        """Write `key` and `value`, and attend. Return (num_tokens, heads * head_dim).

        `query`: (num_tokens, heads, head_dim). `key`, `value`: (num_tokens, kv_heads, head_dim). Rotary embedding is
        already applied. A query that is not finite puts NaN into its token's output or stored key:
        kernels by themselves would give zeros.
        """


def show_nonfinite(attended: Tensor, query: Tensor) -> Tensor:
    """Put NaN into `attended` (num_tokens, heads * head_dim) where `query` (num_tokens, heads, head_dim) is not finite.

    In place: 0 * NaN and 0 * inf are NaN, and adding 0 times anything else changes nothing.
    """
    attended.view_as(query).add_(query, alpha=0)
    return attended
