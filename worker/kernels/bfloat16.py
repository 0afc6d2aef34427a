"""What lies between the products of a decode step in bfloat16 on a CPU, compiled by numba: a call instead of ten.

torch spends most of a small step on calls: norms, rotations, gathered pages and masks are operations on a few kilobytes
each. One loop over the rows does the work of each group of them, reads pages where they lie, and rounds once.

numpy has no bfloat16. Arrays hold its bits as uint16, which are the upper half of a float32:

    bfloat16  sEEEEEEEEmmmmmmm                       widened: bits << 16
    float32   sEEEEEEEEmmmmmmm................       narrowed: to the nearest, ties to even

NaN stays NaN: a broken model must be noticed. So `fastmath` leaves out what would let the compiler forget NaN.
"""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from worker.kernels.compiled import compiled
from worker.kernels.openmp import bits_at, floats_at

carray: Any = numba.carray  # type: ignore[attr-defined]
Bits = NDArray[np.uint16]
Floats = NDArray[np.float32]
Indices = NDArray[np.int64]
_SEARCHED: Final = 1024
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_INFINITE: Final = np.uint32(0x7F800000)


@compiled()
def narrow(bits: int) -> int:
    return np.uint16(np.uint32(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)  # type: ignore[return-value]


@compiled("void(u2[:, ::1], f4[::1], f8, u2[:, ::1])")
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
            out[row, i] = narrow(bits[i])


@compiled("void(i8, i8, f8, i8, i8, i8)")
def rms_norm_at(states: int, weight: int, offset: float, out: int, num_rows: int, size: int) -> None:
    """Of addresses, which are made faster than arrays."""
    shape = (num_rows, size)
    rms_norm(carray(bits_at(states), shape), carray(floats_at(weight), size), offset, carray(bits_at(out), shape))


@compiled("void(u2[:, ::1], u2[:, :, ::1], i8)")
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
                stored[i] = narrow(turned_bits[i])


@compiled("void(u2[:, ::1], i8[::1])", nogil=True)
def best(states: Bits, out: Indices) -> None:
    """The first of the highest of each row (rows, size); NaN is higher than anything.

    Compared as integers in the same order: of a negative number, the negated magnitude. The magnitude of infinity is
    added, so that -inf becomes 0, and NaN with a sign, which would lie below, comes out on top.
    """
    num_rows, size = states.shape
    keys = np.empty(_SEARCHED, np.uint32)
    for row in range(num_rows):
        highest = np.uint32(0)
        for first in range(0, size, _SEARCHED):
            part = states[row, first : first + _SEARCHED]
            top = np.uint32(0)
            for i in range(part.size):
                word = np.uint32(np.uint32(part[i]) << 16)
                magnitude = np.uint32(word & _MAGNITUDE)
                keys[i] = np.uint32((np.uint32(0) - magnitude if word > _MAGNITUDE else magnitude) + _INFINITE)
                top = max(top, keys[i])
            if first == 0 or top > highest:
                highest = top
                i = 0
                while keys[i] != top:
                    i += 1
                out[row] = first + i
