"""Cutting the tail of a distribution: top-k, top-p, min-p and locally typical sampling, in this order.

Each works on what the one before left, renormalised. All take (rows, vocab_size) float32 logits, already divided by the
temperature, and set what they drop to -inf, in place. Tokens that tie with the last one kept are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from worker.device import to_device
from worker.wire import SamplingParams

_DROPPED: Final = float("-inf")
_NUCLEUS_CANDIDATES: Final = 1024
"""Nuclei are nearly always smaller than this, and a CPU sorts a part of the vocabulary several times as fast."""


def truncate(logits: Tensor, params: Sequence[SamplingParams]) -> None:
    """Apply every truncation that row i's params ask for to row i."""
    vocab_size = logits.shape[1]
    ranks = [p.top_k if 0 < p.top_k < vocab_size else None for p in params]
    _on_rows(logits, ranks, partial(_top_k, most=max((rank for rank in ranks if rank is not None), default=0)))
    _on_rows(logits, [p.top_p if p.top_p < 1 else None for p in params], _top_p)
    _on_rows(logits, [p.min_p if p.min_p > 0 else None for p in params], _min_p)
    _on_rows(logits, [p.typical_p if p.typical_p < 1 else None for p in params], _typical)


def _on_rows(logits: Tensor, values: Sequence[float | None], keep_at_least: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Rows whose value is None stay as they are; of the others, only what `keep_at_least` marks True is kept."""
    rows = [row for row, value in enumerate(values) if value is not None]
    if not rows:
        return
    limits = to_device([value for value in values if value is not None], torch.float32, logits.device)
    if len(rows) == len(values):
        logits.masked_fill_(~keep_at_least(logits, limits), _DROPPED)
        return
    index = to_device(rows, torch.int64, logits.device)
    chosen = logits[index]
    logits[index] = chosen.masked_fill_(~keep_at_least(chosen, limits), _DROPPED)


def _top_k(logits: Tensor, limits: Tensor, most: int) -> Tensor:
    """`most` is the highest of the limits."""
    on_cpu = logits.device.type == "cpu"
    best = -_sorted(-logits) if on_cpu and most > _NUCLEUS_CANDIDATES else logits.topk(most, dim=-1).values
    return logits >= best.gather(1, limits.long()[:, None] - 1)


def _top_p(logits: Tensor, limits: Tensor) -> Tensor:
    """The fewest tokens that hold a share p together. Source: nucleus sampling, arXiv 1904.09751."""
    probabilities = logits.softmax(dim=-1)
    best = _likeliest(probabilities, limits)
    return probabilities >= _last_needed(best, best, limits)


def _likeliest(probabilities: Tensor, limits: Tensor) -> Tensor:
    """The best of each row, in order, as many as every row's nucleus needs. How many that is, a device would have to be
    waited for to tell."""
    if probabilities.device.type == "cpu":
        best = probabilities.topk(min(_NUCLEUS_CANDIDATES, probabilities.shape[1]), dim=-1).values
        if bool((best.sum(dim=-1) >= limits).all()):
            return best
    return -_sorted(-probabilities)


def _min_p(logits: Tensor, limits: Tensor) -> Tensor:
    """At least p times as likely as the best token. Source: arXiv 2407.01082."""
    return logits >= logits.amax(dim=-1, keepdim=True) + limits[:, None].log()


def _typical(logits: Tensor, limits: Tensor) -> Tensor:
    """The fewest tokens of share p whose surprise is nearest to the entropy. Source: arXiv 2202.00666."""
    log_probabilities = logits.log_softmax(dim=-1)
    probabilities = log_probabilities.exp()
    entropy = -(probabilities * log_probabilities.clamp(min=-math.inf).nan_to_num(neginf=0.0)).sum(-1, keepdim=True)
    distances = (-log_probabilities - entropy).abs()
    order = _order(distances)
    nearest = distances.gather(1, order)
    return distances <= _last_needed(nearest, probabilities.gather(1, order), limits)


def _sorted(values: Tensor) -> Tensor:
    """Each row, ascending. Numpy's sort is vectorised on a CPU where torch's is not: 30 times as fast."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=-1))
    return values.sort(dim=-1).values


def _order(values: Tensor) -> Tensor:
    """The places of each row's values, ascending."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.argsort(values.numpy(), axis=-1))
    return values.argsort(dim=-1)


def _last_needed(ordered: Tensor, shares: Tensor, limits: Tensor) -> Tensor:
    """(rows, 1): of `ordered`, the entry at which the cumulated `shares` first reach the limit."""
    before = shares.cumsum(dim=-1) - shares
    count = (before < limits[:, None]).sum(dim=-1, keepdim=True).clamp(min=1)
    return ordered.gather(1, count - 1)
