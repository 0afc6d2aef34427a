"""Attention of decodes in bfloat16 over pages where they lie, compiled for the shape of a model's heads.

    unit      one KV head of one row: the queries that share it read each of its keys and values once
    tile      so many of its pages that their scores stay in the cache:
                  scores = queries . keys         the pages after these are asked for meanwhile
                  sums and the total faded to the new highest score, values added by 2 ** (score - highest)
    at last   sums / total, narrowed

Threads take units until none is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.kernels.bfloat16 import Floats, Indices, carray, narrow
from worker.kernels.compiled import compiled, compiled_callback
from worker.kernels.openmp import indices_at, run_on_team, take_unit, team_address, words_at
from worker.kernels.vectors import add_values, dot_keys, keys_at_once, prefetch

literally: Any = numba.literally  # type: ignore[attr-defined]
Words = NDArray[np.uint32]
_LOG2_E: Final = np.float32(1.4426950408889634)
_TILE_KEYS: Final = 256
_MIN_EXPONENT: Final = np.float32(-126.0)
_UPPER: Final = np.uint32(0xFFFF0000)
_HALF_WORD: Final = np.uint32(16)
_ADDRESSES: Final = ("query", "keys", "values", "tables", "bounds", "out")
_SIZES: Final = ("num_rows", "num_kv_heads", "block_size", "width", "query_stride")
_WORK: Final = np.dtype([(name, np.int64) for name in ("next_unit", *_ADDRESSES, *_SIZES)] + [("factor", np.float64)])


@compiled()
def _power_of_two(x: np.float32) -> np.float32:
    """2**x for |x| <= 1/2 by its series, exact to float32's last bit but one."""
    series = np.float32(1.5403530e-4)
    series = series * x + np.float32(1.3333558e-3)
    series = series * x + np.float32(9.6181291e-3)
    series = series * x + np.float32(5.5504109e-2)
    series = series * x + np.float32(2.4022651e-1)
    series = series * x + np.float32(6.9314718e-1)
    return series * x + np.float32(1.0)


@compiled()
def _exponentials(scores: Floats, powers: NDArray[np.int32], num_keys: int, highest: np.float32) -> np.float32:
    """2 ** (score - highest) in place -> their sum; NaN when a score is not finite. `powers` is scratch memory.

    2**x = 2**n * 2**f with n the nearest integer.
    """
    check = np.float32(0.0)
    for k in range(num_keys):
        check += scores[k] * np.float32(0.0)
        x = scores[k] - highest
        x = x if x > _MIN_EXPONENT else _MIN_EXPONENT
        n = np.int32(x - np.float32(0.5))
        scores[k] = _power_of_two(x - np.float32(n))
        powers[k] = (n + 127) << 23
    factors = powers.view(np.float32)
    total = np.float32(0.0)
    for k in range(num_keys):
        scores[k] *= factors[k]
        total += scores[k]
    return total + check


@compiled()
def _attend_head(
    query: Words,
    keys: int,
    values: int,
    stride: int,
    block_size: int,
    table: Indices,
    start: int,
    stop: int,
    factor: np.float32,
    out: Words,
    queries: Floats,
    sums: Floats,
    scores: Floats,
    powers: NDArray[np.int32],
    bunch: int,
    reps: int,
    size: int,
) -> None:
    """One unit; `keys` and `values` are the addresses of its head in the first page, rows `stride` apart.

    The last three are constants of the caller's. (They are not variables of a function around this one because numba
    keeps nothing on disk of a function that calls such a one.)
    """
    half = size // 2
    pitch, page, tile = scores.strides[0], block_size * stride, max(1, _TILE_KEYS // block_size)
    query_bits, sum_bits = queries.view(np.uint32), sums.view(np.uint32)
    for rep in range(reps):
        for i in range(half):
            word = query[rep * half + i]
            query_bits[rep, i] = word << _HALF_WORD
            query_bits[rep, half + i] = word & _UPPER
        for i in range(size):
            queries[rep, i] *= factor
            sums[rep, i] = np.float32(0.0)
    highest, totals = np.full(reps, -np.inf, np.float32), np.zeros(reps, np.float32)
    first_place, stop_place = start // block_size, -(-stop // block_size)
    for first in range(first_place, stop_place, tile):
        last = min(first + tile, stop_place)
        num_keys = 0
        for place in range(first, last):
            begin = max(start - place * block_size, 0)
            end = min(stop - place * block_size, block_size)
            row = keys + table[place] * page + begin * stride
            ahead = keys + table[place + 1] * page if place + 1 < last else values + table[first] * page
            k = 0
            while k < end - begin:
                score = scores.ctypes.data + 4 * (num_keys + k)
                if k + bunch <= end - begin:
                    prefetch(ahead + k * stride, stride, literally(bunch), literally(size))
                    dot_keys(
                        queries.ctypes.data,
                        row + k * stride,
                        stride,
                        score,
                        pitch,
                        literally(bunch),
                        literally(reps),
                        literally(size),
                    )
                    k += bunch
                else:
                    prefetch(ahead + k * stride, stride, 1, literally(size))
                    dot_keys(
                        queries.ctypes.data, row + k * stride, stride, score, pitch, 1, literally(reps), literally(size)
                    )
                    k += 1
            num_keys += end - begin
        for rep in range(reps):
            top = highest[rep]
            for k in range(num_keys):
                top = max(top, scores[rep, k])
            fading = np.exp2(highest[rep] - top)
            highest[rep] = top
            totals[rep] = totals[rep] * fading + _exponentials(scores[rep], powers, num_keys, top)
            for i in range(size):
                sums[rep, i] *= fading
        num_keys = 0
        for place in range(first, last):
            begin = max(start - place * block_size, 0)
            end = min(stop - place * block_size, block_size)
            if place + 1 < stop_place:
                ahead = (values if place + 1 < last else keys) + table[place + 1] * page
                for k in range(block_size):
                    prefetch(ahead + k * stride, stride, 1, literally(size))
            row = values + table[place] * page + begin * stride
            weights = scores.ctypes.data + 4 * num_keys
            add_values(sums.ctypes.data, weights, pitch, row, stride, end - begin, literally(reps), literally(size))
            num_keys += end - begin
    for rep in range(reps):
        inverse = np.float32(1.0) / totals[rep]
        for i in range(size):
            sums[rep, i] *= inverse
        for i in range(half):
            even, odd = narrow(sum_bits[rep, i]), narrow(sum_bits[rep, half + i])
            out[rep * half + i] = np.uint32(even) | (np.uint32(odd) << _HALF_WORD)


@cache
def _compile_units(reps: int, size: int) -> Any:
    """A kernel for `worker.kernels.openmp` over a `_WORK`."""
    half, bunch = size // 2, keys_at_once(reps, size)

    def attend_units(address: int) -> None:
        work = carray(address, 1, _WORK)[0]
        num_kv_heads, block_size, head_bytes = work.num_kv_heads, work.block_size, 2 * size
        queries, sums = np.empty((reps, size), np.float32), np.empty((reps, size), np.float32)
        num_scores = max(_TILE_KEYS, block_size)
        scores, powers = np.empty((reps, num_scores), np.float32), np.empty(num_scores, np.int32)
        tables = carray(indices_at(work.tables), (work.num_rows, work.width))
        bounds = carray(indices_at(work.bounds), (work.num_rows, 2))
        while True:
            unit = take_unit(address)
            if unit >= work.num_rows * num_kv_heads:
                return
            row, head = unit // num_kv_heads, unit % num_kv_heads
            query = words_at(work.query + row * work.query_stride + head * reps * head_bytes)
            out = words_at(work.out + unit * reps * head_bytes)
            _attend_head(
                carray(query, reps * half),
                work.keys + head * head_bytes,
                work.values + head * head_bytes,
                num_kv_heads * head_bytes,
                block_size,
                tables[row],
                bounds[row, 0],
                bounds[row, 1],
                np.float32(work.factor),
                carray(out, reps * half),
                queries,
                sums,
                scores,
                powers,
                bunch,
                reps,
                size,
            )

    # A file of its own on disk: two processes that keep two shapes in one at once may mix them up.
    attend_units.__qualname__ = f"attend_units_of_{reps}_by_{size}"
    return compiled_callback("void(voidptr)")(attend_units)


@compiled("void(i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8[:, ::1], i8[:, ::1], f8, i8, i8, i8, i8)", nogil=True)
def _attend(
    query: int,
    query_stride: int,
    key: int,
    key_stride: int,
    value: int,
    value_stride: int,
    keys: int,
    values: int,
    block_size: int,
    num_kv_heads: int,
    size: int,
    tables: Indices,
    bounds: Indices,
    scale: float,
    out: int,
    kernel: int,
    team: int,
    num_threads: int,
) -> None:
    """Of addresses, and strides of rows in bytes."""
    num_rows, row_words = len(bounds), num_kv_heads * size // 2
    for row in range(num_rows):
        place, offset = divmod(bounds[row, 1] - 1, block_size)
        slot = (tables[row, place] * block_size + offset) * 4 * row_words
        own_key, stored_key = words_at(key + row * key_stride), words_at(keys + slot)
        own_value, stored_value = words_at(value + row * value_stride), words_at(values + slot)
        for i in range(row_words):
            stored_key[i] = own_key[i]
            stored_value[i] = own_value[i]
    work = np.zeros(1, _WORK)
    work[0].query, work[0].query_stride, work[0].out = query, query_stride, out
    work[0].keys, work[0].values = keys, values
    work[0].tables, work[0].width, work[0].bounds = tables.ctypes.data, tables.shape[1], bounds.ctypes.data
    work[0].num_rows, work[0].block_size, work[0].num_kv_heads = num_rows, block_size, num_kv_heads
    work[0].factor = scale * _LOG2_E
    run_on_team(team, min(num_threads, num_rows * num_kv_heads), kernel, work.ctypes.data)
    work[0].next_unit = 0  # numba frees an array behind its last mention: without this one, before the call


@dataclass(frozen=True, slots=True)
class Decodes:
    """Sequences with one query each, whose own key is the last that it sees."""

    tables: Indices
    """(rows, width): the blocks of each sequence"""
    bounds: Indices
    """(rows, 2): the first key that the query sees, and the one after the last"""

    @property
    def num_rows(self) -> int:
        return len(self.bounds)


class AttentionKernel:
    """For one shape of heads. To make one takes seconds if none is kept on disk."""

    __slots__ = ("_block_size", "_num_kv_heads", "_scale", "_size", "_team", "_units")

    def __init__(self, *, num_heads: int, num_kv_heads: int, size: int, scale: float, block_size: int) -> None:
        """Heads have `size` elements; `scale` is for products of query and key."""
        self._num_kv_heads, self._size = num_kv_heads, size
        self._block_size = block_size
        self._scale = scale
        self._units = _compile_units(num_heads // num_kv_heads, size)
        self._team = team_address()

    def __call__(
        self, states: tuple[Tensor, Tensor, Tensor], keys: Tensor, values: Tensor, decodes: Decodes, out: Tensor
    ) -> None:
        """Store a key and a value a row, then attend from the query: `states` are queries (rows, heads, head_dim), keys
        and values (rows, kv_heads, head_dim), in bfloat16, in any strides.

        Pools (num_blocks, block_size, kv_heads, head_dim); out (rows, heads * head_dim). Uses torch's number of
        threads; other threads of the interpreter run meanwhile.
        """
        query, key, value = (self._side_by_side(one) for one in states)
        _attend(
            query.data_ptr(),
            2 * query.stride(0),
            key.data_ptr(),
            2 * key.stride(0),
            value.data_ptr(),
            2 * value.stride(0),
            keys.data_ptr(),
            values.data_ptr(),
            self._block_size,
            self._num_kv_heads,
            self._size,
            decodes.tables,
            decodes.bounds,
            self._scale,
            out.data_ptr(),
            self._units.address,
            self._team,
            torch.get_num_threads(),
        )

    def _side_by_side(self, states: Tensor) -> Tensor:
        """A copy if the heads of a row lie apart: those of some models of transformers do."""
        _, head, element = states.stride()
        if element == 1 and (head == self._size or states.shape[1] == 1):
            return states
        return states.contiguous()
