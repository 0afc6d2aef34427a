"""The one interface behind which every attention kernel stands, and the batch that goes through it.

A batch is the tokens of several sequences laid end to end. Sequences that bring one token (decodes) come first, sorted
by context length; the rest (prefill chunks) follow.

    tokens   | d0 | d1 | d2 | c0 c0 c0 c0 c0 c0 | c1 c1 c1 |
    spans      1    1    1    6 tokens            3 tokens
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

ROWS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CONTEXTS: Final = (2048, 16384, 131072)
"""Tokens: a kernel divides its work by the length that it is made for, so one for all would be slow for short ones."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What attention needs to know of a model."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor on query-key products."""
    windows: tuple[int | None, ...] = ()
    """Per layer: how many tokens a query sees, itself included, or None for all. Empty: all, everywhere."""

    @property
    def longest_window(self) -> int | None:
        """How far back any layer sees; None: one of them sees everything."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if windows and len(windows) == len(self.windows) else None

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one sequence: their queries see all its tokens up to themselves."""

    start: int
    """Tokens of the sequence before this span; their KV lies in the pool already."""
    num_tokens: int
    block_table: Sequence[int]
    """Covers all `stop` tokens."""

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tensors of one forward; `plan` is what the attention prepared for it, the same for every layer."""

    token_ids: Tensor
    """(num_tokens,) int64"""
    positions: Tensor
    """(num_tokens,) int64"""
    slots: Tensor
    """(num_tokens,) int64: where the KV of each token goes"""
    plan: object


class Attention(Protocol):
    """Paged causal attention over one KV pool. Writes the step's K and V before it reads, layer by layer."""

    @property
    def name(self) -> str: ...

    def plan(self, spans: Sequence[Span]) -> object:
        """Work out, once for a step, what every layer will need. Order of spans: see the module."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        """(num_tokens, heads, head_dim) and twice (num_tokens, kv_heads, head_dim) -> (num_tokens, heads * head_dim).

        Rotary embedding is already applied. A query that is not finite leaves NaN in its token's row, or in the key
        that is stored of it: the kernels alone would take it for one that sees nothing, and give zeros.
        """


def show_nonfinite(attended: Tensor, query: Tensor) -> Tensor:
    """Put NaN into `attended` (num_tokens, heads * head_dim) where `query` (num_tokens, heads, head_dim) is not finite.

    In place: 0 times what is not finite is NaN, and 0 times anything else changes nothing.
    """
    attended.view_as(query).add_(query, alpha=0)
    return attended


def merge_partials(one: Tensor, one_lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Outputs (..., head_dim) with their log-sum-exps (...) float32 -> the output over both sets, in the same dtype.

    Source: FlashDecoding's reduction, out = sum of out_i * exp(lse_i - lse).
    """
    share = torch.sigmoid(other_lse.float() - one_lse.float()).unsqueeze(-1)
    return torch.lerp(one.float(), other.float(), share).to(one.dtype)


def padded(size: int, sizes: Sequence[int]) -> int:
    """The smallest of the ascending `sizes` that holds `size`; beyond them, a multiple of the last."""
    if size <= sizes[-1]:
        return sizes[bisect_left(sizes, size)]
    return -(-size // sizes[-1]) * sizes[-1]
