"""A Triton kernel that draws a token from each row of logits on a GPU: one launch, and no sort of the vocabulary.

One program reads a row a few times. A limit (top-k, top-p, typical) keeps what has the lowest keys. The last key that
it needs is found digit by digit, as in a radix sort: a pass gives the sums of a digit. Weights are integers, so
sums do not depend on the order. worker/kernels/sampling.h has the same limits for CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.cpu import UNIFORM_BITS, Limits
from worker.kernels.device import to_device

_CHUNK: Final = 1024
"""Logits that a program has in its registers, each compared with the pivots of a digit."""
_DIGITS: Final = tl.constexpr(16)
_LAST_SHIFT: Final = tl.constexpr(28)
_ONE: Final = tl.constexpr(float(1 << 40))
"""The weight of the highest logit: sums over any vocabulary fit into 64 bits."""
_ALL: Final = tl.constexpr(0x7FFFFFFF)
_BY_RANK: Final = tl.constexpr(0)
_BY_SHARE: Final = tl.constexpr(1)
_BY_SURPRISE: Final = tl.constexpr(2)


def draw(logits: Tensor, limits: Sequence[Limits], draws: Sequence[int]) -> Tensor:
    """Draw from (rows, vocab_size) float32, contiguous, by the limits and numbers in units of 2^-53.

    Returns (rows,) int64.
    """
    columns = np.array([(*limit, number) for limit, number in zip(limits, draws, strict=True)]).T.copy()
    columns[[2, 3, 6]] /= 1 << UNIFORM_BITS
    table = to_device(torch.from_numpy(columns), torch.float64, logits.device)
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    _draw[(len(logits),)](logits, table, out, logits.shape[1], len(logits), _CHUNK)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _load(row: tl.tensor, start: tl.tensor, size: tl.tensor, CHUNK: tl.constexpr) -> tl.tensor:
    places = start + tl.arange(0, CHUNK)
    return tl.load(row + places, mask=places < size, other=float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _keys(x: tl.tensor, highest: tl.tensor, scale: tl.tensor, middle: tl.tensor, BY: tl.constexpr) -> tl.tensor:
    """Return keys as integers in the order of the floats, which are not negative."""
    distance = highest - x
    if BY == _BY_SURPRISE:
        distance = tl.abs(distance * scale - middle)
    return distance.to(tl.int32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _weights(
    x: tl.tensor, highest: tl.tensor, scale: tl.tensor, middle: tl.tensor, last_key: tl.tensor, last_surprise: tl.tensor
) -> tl.tensor:
    weights = (tl.exp2((x - highest) * scale) * _ONE).to(tl.int64)
    kept = (_keys(x, highest, scale, middle, _BY_SHARE) <= last_key) & (x > float("-inf"))
    kept = kept & (_keys(x, highest, scale, middle, _BY_SURPRISE) <= last_surprise)
    return tl.where(kept, weights, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _total(
    row: tl.tensor, size: tl.tensor, highest: tl.tensor, scale: tl.tensor, last_key: tl.tensor, CHUNK: tl.constexpr
) -> tl.tensor:
    total = tl.zeros((), tl.int64)
    for start in range(0, size, CHUNK):
        x = _load(row, start, size, CHUNK)
        total += tl.sum(_weights(x, highest, scale, 0.0, last_key, _ALL))
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _last_needed(
    row: tl.tensor,
    size: tl.tensor,
    highest: tl.tensor,
    scale: tl.tensor,
    middle: tl.tensor,
    last_key: tl.tensor,
    needed: tl.tensor,
    BY: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """Return the lowest key at which what is kept up to it reaches `needed`; all of it if it never does."""
    found = tl.zeros((), tl.int32)
    for digit in range(8):
        # The pivots are the highest keys that begin with `found` and each digit. The first digit is at most 7.
        shift = _LAST_SHIFT - 4 * digit
        pivots = found + ((tl.arange(0, _DIGITS) + 1) << shift) - 1
        pivots = tl.where(pivots < found, _ALL, pivots)
        sums = tl.zeros((_DIGITS,), tl.int64)
        for start in range(0, size, CHUNK):
            x = _load(row, start, size, CHUNK)
            if BY == _BY_RANK:
                amounts = (x > float("-inf")).to(tl.int64)
            else:
                amounts = _weights(x, highest, scale, middle, last_key, _ALL)
            keys = _keys(x, highest, scale, middle, BY)
            sums += tl.sum(tl.where(keys[:, None] <= pivots[None, :], amounts[:, None], 0), axis=0)
        num_below = tl.sum((sums < needed).to(tl.int32))
        found += tl.minimum(num_below, tl.where(digit == 0, 7, 15)) << shift
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _draw(
    logits: tl.tensor, limits: tl.tensor, out: tl.tensor, size: tl.tensor, num_rows: tl.tensor, CHUNK: tl.constexpr
) -> None:
    program = tl.program_id(0).to(tl.int64)
    row, limit = logits + program * size, limits + program
    margin, rank = tl.load(limit), tl.load(limit + num_rows).to(tl.int64)
    top_p, typical_p = tl.load(limit + 2 * num_rows), tl.load(limit + 3 * num_rows)
    scale, uniform = tl.load(limit + 5 * num_rows).to(tl.float32), tl.load(limit + 6 * num_rows)
    highest = tl.full((), float("-inf"), tl.float32)
    for start in range(0, size, CHUNK):
        highest = tl.maximum(highest, tl.max(_load(row, start, size, CHUNK)))
    last_key = tl.full((), _ALL, tl.int32)
    if (rank > 0) & (rank < size):
        last_key = _last_needed(row, size, highest, scale, 0.0, last_key, rank, _BY_RANK, CHUNK)
    if top_p < 1.0:
        needed = tl.ceil(_total(row, size, highest, scale, last_key, CHUNK).to(tl.float64) * top_p).to(tl.int64)
        needed = tl.maximum(needed, 1)
        last_key = _last_needed(row, size, highest, scale, 0.0, last_key, needed, _BY_SHARE, CHUNK)
    if margin < float("inf"):
        last_key = tl.minimum(last_key, margin.to(tl.float32).to(tl.int32, bitcast=True))
    middle = tl.zeros((), tl.float32)
    last_surprise = tl.full((), _ALL, tl.int32)
    if typical_p < 1.0:
        moment = tl.zeros((), tl.float64)
        total = _total(row, size, highest, scale, last_key, CHUNK).to(tl.float64)
        for start in range(0, size, CHUNK):
            x = _load(row, start, size, CHUNK)
            weights = _weights(x, highest, scale, 0.0, last_key, _ALL).to(tl.float64)
            moment += tl.sum(tl.where(weights > 0, weights * ((highest - x) * scale).to(tl.float64), 0.0))
        middle = (moment / total).to(tl.float32)
        needed = tl.maximum(tl.ceil(total * typical_p).to(tl.int64), 1)
        last_surprise = _last_needed(row, size, highest, scale, middle, last_key, needed, _BY_SURPRISE, CHUNK)
    total = tl.zeros((), tl.int64)
    for start in range(0, size, CHUNK):
        x = _load(row, start, size, CHUNK)
        total += tl.sum(_weights(x, highest, scale, middle, last_key, last_surprise))
    target = (total.to(tl.float64) * uniform).to(tl.int64)
    before = tl.zeros((), tl.int64)
    token = tl.zeros((), tl.int32)
    for start in range(0, size, CHUNK):
        x = _load(row, start, size, CHUNK)
        weights = _weights(x, highest, scale, middle, last_key, last_surprise)
        token += tl.sum((before + tl.cumsum(weights, 0) <= target).to(tl.int32))
        before += tl.sum(weights)
    tl.store(out + program, tl.minimum(token, size - 1).to(tl.int64))
