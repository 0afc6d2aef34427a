"""What lies between the products of a decode step in bfloat16 on a CPU, compiled by numba: a call instead of ten.

torch spends most of a small step on calls: norms, rotations, gathered pages and masks are operations on a few kilobytes
each. One loop over the rows does the work of each group of them, reads pages where they lie, and rounds once.

numpy has no bfloat16. Arrays hold its bits as uint16, which are the upper half of a float32:

    bfloat16  sEEEEEEEEmmmmmmm                       widened: bits << 16
    float32   sEEEEEEEEmmmmmmm................       narrowed: to the nearest, ties to even

NaN stays NaN: a broken model must be noticed. So `fastmath` leaves out what would let the compiler forget NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint16]
Floats = NDArray[np.float32]
Indices = NDArray[np.int64]
_FAST: Final = {"reassoc", "contract", "arcp", "nsz"}
_LOG2_E: Final = np.float32(1.4426950408889634)
_MIN_EXPONENT: Final = np.float32(-126.0)
_BUNCH: Final = 4
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _compiled(*signatures: str, nogil: bool = False) -> Callable[[_Function], _Function]:
    """Compiled when this module is imported, if there is a signature, so that no step waits for it; kept on disk where
    there is a place for it.

    What takes microseconds keeps the interpreter's lock: to get it back from a busy event loop may take milliseconds.
    """
    options: dict[str, Any] = {"fastmath": _FAST, "nogil": nogil, "error_model": "numpy"}

    def decorate(function: _Function) -> _Function:
        njit: Any = numba.njit
        try:
            compiled: _Function = njit(list(signatures) or None, cache=True, **options)(function)
        except RuntimeError:  # neither beside this file nor in the home folder
            compiled = njit(list(signatures) or None, **options)(function)
        return compiled

    return decorate


@_compiled()
def _narrow(bits: int) -> int:
    return np.uint16(np.uint32(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)  # type: ignore[return-value]


@_compiled("void(u2[:, ::1], f4[::1], f8, u2[:, ::1])")
def rms_norm(states: Bits, weight: Floats, offset: float, out: Bits) -> None:
    """x * weight / sqrt(sum(x^2) + offset), row by row, (rows, size); weight (size,)."""
    num_rows, size = states.shape
    wide = np.empty(size, np.float32)
    bits = wide.view(np.uint32)
    for row in range(num_rows):
        for i in range(size):
            bits[i] = np.uint32(states[row, i]) << 16
        total = np.float32(0.0)
        for i in range(size):
            total += wide[i] * wide[i]
        factor = np.float32(1.0) / np.sqrt(total + np.float32(offset))
        for i in range(size):
            wide[i] = wide[i] * factor * weight[i]
        for i in range(size):
            out[row, i] = _narrow(bits[i])


@_compiled("void(u2[:, ::1], u2[:, :, ::1], i8)")
def rotate(states: Bits, table: Bits, num_heads: int) -> None:
    """Rotate the first `num_heads` heads of (rows, ...) in place, by rows (rows, 2, head_dim) of `worker.model.rope`'s
    table."""
    num_rows, _, size = table.shape
    half = size // 2
    cos, sin, head = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    turned = np.empty(size, np.float32)
    cos_bits, sin_bits, head_bits = cos.view(np.uint32), sin.view(np.uint32), head.view(np.uint32)
    turned_bits = turned.view(np.uint32)
    upper, upper_turned, upper_cos, upper_sin = head[half:], turned[half:], cos[half:], sin[half:]
    for row in range(num_rows):
        for i in range(size):
            cos_bits[i] = np.uint32(table[row, 0, i]) << 16
            sin_bits[i] = np.uint32(table[row, 1, i]) << 16
        for first in range(0, num_heads * size, size):
            stored = states[row, first : first + size]
            for i in range(size):
                head_bits[i] = np.uint32(stored[i]) << 16
            for i in range(half):
                turned[i] = head[i] * cos[i] + upper[i] * sin[i]
            for i in range(half):
                upper_turned[i] = upper[i] * upper_cos[i] + head[i] * upper_sin[i]
            for i in range(size):
                stored[i] = _narrow(turned_bits[i])


@_compiled()
def _exponentials(scores: Floats, powers: NDArray[np.int32], num_keys: int) -> np.float32:
    """2 ** (score - highest) in place -> their sum; NaN when a score is not finite. `powers` is scratch memory.

    2**x = 2**n * 2**f with n the nearest integer; 2**f, |f| <= 1/2, by its series, exact to float32's last bit but one.
    """
    highest, check = scores[0], np.float32(0.0)
    for k in range(num_keys):
        highest = max(highest, scores[k])
        check += scores[k] * np.float32(0.0)
    for k in range(num_keys):
        x = scores[k] - highest
        x = x if x > _MIN_EXPONENT else _MIN_EXPONENT
        n = np.int32(x - np.float32(0.5))
        f = x - np.float32(n)
        series = np.float32(1.5403530e-4)
        series = series * f + np.float32(1.3333558e-3)
        series = series * f + np.float32(9.6181291e-3)
        series = series * f + np.float32(5.5504109e-2)
        series = series * f + np.float32(2.4022651e-1)
        series = series * f + np.float32(6.9314718e-1)
        scores[k] = series * f + np.float32(1.0)
        powers[k] = (n + 127) << 23
    factors = powers.view(np.float32)
    total = np.float32(0.0)
    for k in range(num_keys):
        scores[k] *= factors[k]
        total += scores[k]
    return total + check


@_compiled("void(u2[:, :, :], u2[:, :, :], u2[:, :, :, ::1], u2[:, :, :, ::1], i8[::1])")
def write(key: Bits, value: Bits, keys: Bits, values: Bits, slots: Indices) -> None:
    """Store (rows, kv_heads, head_dim) at `slots` of pools (num_blocks, block_size, kv_heads, head_dim)."""
    num_rows, num_kv_heads, size = key.shape
    block_size = keys.shape[1]
    for row in range(num_rows):
        block, offset = slots[row] // block_size, slots[row] % block_size
        stored_keys, stored_values = keys[block, offset], values[block, offset]
        for group in range(num_kv_heads):
            for i in range(size):
                stored_keys[group, i] = key[row, group, i]
                stored_values[group, i] = value[row, group, i]


@_compiled()
def _add_bunch(sums: Floats, weights: Floats, bunch: Floats) -> None:
    """sums (reps, size) += weights (reps, _BUNCH) @ bunch (_BUNCH, size); several at once, for sums stay in memory."""
    for rep in range(sums.shape[0]):
        a, b, c, d = weights[rep, 0], weights[rep, 1], weights[rep, 2], weights[rep, 3]
        for i in range(sums.shape[1]):
            sums[rep, i] += a * bunch[0, i] + b * bunch[1, i] + c * bunch[2, i] + d * bunch[3, i]


@_compiled("void(u2[:, :, :], u2[:, :, :, ::1], u2[:, :, :, ::1], i8[:, ::1], i8[:, ::1], f8, u2[:, ::1])", nogil=True)
def attend(query: Bits, keys: Bits, values: Bits, tables: Indices, bounds: Indices, scale: float, out: Bits) -> None:
    """One query a row, (rows, heads, head_dim), over keys bounds[row, 0] .. bounds[row, 1] - 1 of the row's sequence.

    Pools as in `write`; tables (rows, width) name the sequence's blocks; out (rows, heads * head_dim). The queries that
    share a KV head read each of its keys once.
    """
    num_rows, num_heads, size = query.shape
    block_size, num_kv_heads = keys.shape[1], keys.shape[2]
    reps = num_heads // num_kv_heads
    longest = 1
    for row in range(num_rows):
        longest = max(longest, bounds[row, 1] - bounds[row, 0])
    queries, sums = np.empty((reps, size), np.float32), np.empty((reps, size), np.float32)
    # room for whole bunches of values
    scores, powers = np.zeros((reps, longest + _BUNCH), np.float32), np.empty(longest, np.int32)
    states, bunch = np.empty(size, np.float32), np.zeros((_BUNCH, size), np.float32)
    query_bits, sum_bits, bits = queries.view(np.uint32), sums.view(np.uint32), states.view(np.uint32)
    bunch_bits = bunch.view(np.uint32)
    factor = np.float32(scale) * _LOG2_E
    for row in range(num_rows):
        start, stop = bounds[row, 0], bounds[row, 1]
        for group in range(num_kv_heads):
            for rep in range(reps):
                for i in range(size):
                    query_bits[rep, i] = np.uint32(query[row, group * reps + rep, i]) << 16
                for i in range(size):
                    queries[rep, i] *= factor
            k = 0
            for place in range(start // block_size, -(-stop // block_size)):
                block, base = tables[row, place], place * block_size
                for offset in range(max(start - base, 0), min(stop - base, block_size)):
                    for i in range(size):
                        bits[i] = np.uint32(keys[block, offset, group, i]) << 16
                    for rep in range(reps):
                        score = np.float32(0.0)
                        for i in range(size):
                            score += queries[rep, i] * states[i]
                        scores[rep, k] = score
                    k += 1
            num_keys = stop - start
            for rep in range(reps):
                inverse = np.float32(1.0) / _exponentials(scores[rep], powers, num_keys)
                for k in range(num_keys):
                    scores[rep, k] *= inverse
                for k in range(num_keys, num_keys + _BUNCH):
                    scores[rep, k] = np.float32(0.0)
                for i in range(size):
                    sums[rep, i] = np.float32(0.0)
            k = filled = 0
            for place in range(start // block_size, -(-stop // block_size)):
                block, base = tables[row, place], place * block_size
                for offset in range(max(start - base, 0), min(stop - base, block_size)):
                    for i in range(size):
                        bunch_bits[filled, i] = np.uint32(values[block, offset, group, i]) << 16
                    filled += 1
                    if filled == _BUNCH:
                        _add_bunch(sums, scores[:, k : k + _BUNCH], bunch)
                        k += _BUNCH
                        filled = 0
            if filled:
                _add_bunch(sums, scores[:, k : k + _BUNCH], bunch)
            for rep in range(reps):
                first = (group * reps + rep) * size
                for i in range(size):
                    out[row, first + i] = _narrow(sum_bits[rep, i])
