"""The kernels of `worker.kernels.bfloat16` over many rows, or long ones: shared out to all threads."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from worker.kernels import bfloat16
from worker.kernels.bfloat16 import Bits, Floats, Indices, carray
from worker.kernels.compiled import compiled_callback
from worker.kernels.openmp import bits_at, floats_at, indices_at, run_on_team, take_unit, team_address

_UNIT_ROWS: Final = 32
_FIELDS: Final = ("next_unit", "num_rows", "size", "num_heads", "width", "states", "other", "out")
_WORK: Final = np.dtype([*((name, np.int64) for name in _FIELDS), ("offset", np.float64)])


def rms_norm(states: Bits, weight: Floats, offset: float, out: Bits, *, num_threads: int) -> None:
    """`worker.kernels.bfloat16.rms_norm`."""
    fields = {"size": states.shape[1], "other": weight.ctypes.data, "out": out.ctypes.data, "offset": offset}
    _run(_norm_units, num_threads, states, fields)


def rotate(states: Bits, table: Bits, num_heads: int, *, num_threads: int) -> None:
    """`worker.kernels.bfloat16.rotate`."""
    fields = {"size": table.shape[2], "num_heads": num_heads, "other": table.ctypes.data}
    _run(_rotate_units, num_threads, states, fields)


def best(states: Bits, out: Indices, *, num_threads: int) -> None:
    """`worker.kernels.bfloat16.best`."""
    _run(_best_units, num_threads, states, {"size": states.shape[1], "out": out.ctypes.data})


def _run(kernel: Any, num_threads: int, states: Bits, fields: dict[str, float]) -> None:
    """`states` (rows, width) lie in one piece."""
    assert states.flags.c_contiguous
    work = np.zeros(1, _WORK)
    work["num_rows"], work["width"] = states.shape
    work["states"] = states.ctypes.data
    for name, value in fields.items():
        work[name] = value
    run_on_team(team_address(), num_threads, kernel.address, work.ctypes.data)


@compiled_callback("void(voidptr)")
def _norm_units(address: int) -> None:
    work = carray(address, 1, _WORK)[0]
    states = carray(bits_at(work.states), (work.num_rows, work.size))
    weight = carray(floats_at(work.other), (work.size,))
    out = carray(bits_at(work.out), (work.num_rows, work.size))
    while True:
        first = take_unit(address) * _UNIT_ROWS
        if first >= work.num_rows:
            return
        rows = slice(first, min(first + _UNIT_ROWS, work.num_rows))
        bfloat16.rms_norm(states[rows], weight, work.offset, out[rows])


@compiled_callback("void(voidptr)")
def _best_units(address: int) -> None:
    work = carray(address, 1, _WORK)[0]
    states = carray(bits_at(work.states), (work.num_rows, work.size))
    out = carray(indices_at(work.out), (work.num_rows,))
    while True:
        row = take_unit(address)
        if row >= work.num_rows:
            return
        bfloat16.best(states[row : row + 1], out[row : row + 1])


@compiled_callback("void(voidptr)")
def _rotate_units(address: int) -> None:
    work = carray(address, 1, _WORK)[0]
    states = carray(bits_at(work.states), (work.num_rows, work.width))
    table = carray(bits_at(work.other), (work.num_rows, 2, work.size))
    while True:
        first = take_unit(address) * _UNIT_ROWS
        if first >= work.num_rows:
            return
        rows = slice(first, min(first + _UNIT_ROWS, work.num_rows))
        bfloat16.rotate(states[rows], table[rows], work.num_heads)
