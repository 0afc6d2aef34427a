"""Truncation of a distribution: top-k, top-p, min-p and locally typical sampling, in this order.

Each works on the tokens that the one before kept, renormalised. All take (rows, vocab_size) float32 logits, already
divided by the temperature, and set dropped ones to -inf in place. Ties with the last kept token are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from worker.kernels.device import to_device
from worker.wire import SamplingParams

_DROPPED: Final = float("-inf")
_NUCLEUS_CANDIDATES: Final = 1024
"""Nuclei are nearly always smaller, and a CPU sorts this part of the vocabulary several times as fast."""


def truncate(logits: Tensor, params: Sequence[SamplingParams]) -> None:
    """Apply the truncations of params[i] to row i."""
    ranks = [p.top_k if 0 < p.top_k < logits.shape[1] else None for p in params]
    max_rank = max((rank for rank in ranks if rank is not None), default=0)
    _on_rows(logits, ranks, lambda logits, limits: _top_k(logits, limits, max_rank))
    _on_rows(logits, [p.top_p if p.top_p < 1 else None for p in params], _top_p)
    _on_rows(logits, [p.min_p if p.min_p > 0 else None for p in params], _min_p)
    _on_rows(logits, [p.typical_p if p.typical_p < 1 else None for p in params], _typical)


def _on_rows(logits: Tensor, limits: Sequence[float | None], kept: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Drop what `kept` marks False, in the rows whose limit is not None."""
    rows = [row for row, limit in enumerate(limits) if limit is not None]
    if not rows:
        return
    values = to_device([limit for limit in limits if limit is not None], torch.float32, logits.device)
    if len(rows) == len(limits):
        logits.masked_fill_(~kept(logits, values), _DROPPED)
        return
    index = to_device(rows, torch.int64, logits.device)
    chosen = logits[index]
    logits[index] = chosen.masked_fill_(~kept(chosen, values), _DROPPED)


def _top_k(logits: Tensor, limits: Tensor, max_limit: int) -> Tensor:
    on_cpu = logits.device.type == "cpu"
    best = -_sorted(-logits) if on_cpu and max_limit > _NUCLEUS_CANDIDATES else logits.topk(max_limit, dim=-1).values
    return logits >= best.gather(1, limits.long()[:, None] - 1)


def _top_p(logits: Tensor, limits: Tensor) -> Tensor:
    """Keep the fewest tokens that together have a share p. Source: nucleus sampling, arXiv 1904.09751."""
    probabilities = logits.softmax(dim=-1)
    best = _likeliest(probabilities, limits)
    return probabilities >= _last_needed(best, best, limits)


def _likeliest(probabilities: Tensor, limits: Tensor) -> Tensor:
    """Return the best of each row in order, at least as many as its nucleus needs. A GPU sorts all of them."""
    if probabilities.device.type == "cpu":
        best = probabilities.topk(min(_NUCLEUS_CANDIDATES, probabilities.shape[1]), dim=-1).values
        if bool((best.sum(dim=-1) >= limits).all()):
            return best
    return -_sorted(-probabilities)


def _min_p(logits: Tensor, limits: Tensor) -> Tensor:
    """Keep tokens at least p times as likely as the best token. Source: arXiv 2407.01082."""
    return logits >= logits.amax(dim=-1, keepdim=True) + limits[:, None].log()


def _typical(logits: Tensor, limits: Tensor) -> Tensor:
    """Keep the fewest tokens of share p whose surprise is nearest to the entropy. Source: arXiv 2202.00666."""
    log_probabilities = logits.log_softmax(dim=-1)
    probabilities = log_probabilities.exp()
    entropy = -(probabilities * log_probabilities.clamp(min=-math.inf).nan_to_num(neginf=0.0)).sum(-1, keepdim=True)
    distances = (-log_probabilities - entropy).abs()
    order = _order(distances)
    nearest = distances.gather(1, order)
    return distances <= _last_needed(nearest, probabilities.gather(1, order), limits)


def _sorted(values: Tensor) -> Tensor:
    """Sort each row, ascending. On a CPU numpy's sort is vectorised, and 30 times as fast as torch's."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=-1))
    return values.sort(dim=-1).values


def _order(values: Tensor) -> Tensor:
    """Return the indices that sort each row, ascending."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.argsort(values.numpy(), axis=-1))
    return values.argsort(dim=-1)


def _last_needed(ordered: Tensor, shares: Tensor, limits: Tensor) -> Tensor:
    """Return (rows, 1) the entry of `ordered` at which the cumulated `shares` reach the limit."""
    before = shares.cumsum(dim=-1) - shares
    count = (before < limits[:, None]).sum(dim=-1, keepdim=True).clamp(min=1)
    return ordered.gather(1, count - 1)
