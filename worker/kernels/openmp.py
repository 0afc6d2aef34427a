"""Kernels on the threads of torch's own products.

torch's products run on a team of GNU OpenMP threads, which spin for a while after each of them. Threads of another
library would fight with the spinning ones for the cores. So a kernel is handed to the same library and runs on the same
team: every thread is given the address of the same work and takes units of it until none is left, so that a thread that
comes late costs nobody a wait.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from llvmlite import ir
from numba.core import types

from worker.kernels.compiled import compiled, instructions

logger = logging.getLogger(__name__)

_INDEX: Final = ir.IntType(64)
_BYTES: Final = ir.IntType(8).as_pointer()


@cache
def team_address() -> int:
    """Of `GOMP_parallel` in the library that torch brought along; 0 where torch brought another one."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    try:
        if address := ctypes.cast(ctypes.CDLL(str(found[0])).GOMP_parallel, ctypes.c_void_p).value:
            return address
    except (IndexError, OSError, AttributeError) as error:
        logger.warning("compiled kernels run on one thread: torch has no libgomp to share (%s)", error)
    return 0


@instructions
def _call_on_threads(_: Any, team: Any, num_threads: Any, kernel: Any, work: Any) -> Any:

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: list[ir.Value]) -> ir.Value:
        team, num_threads, kernel, work = arguments
        count, none = builder.trunc(num_threads, ir.IntType(32)), ir.Constant(ir.IntType(32), 0)
        kind = ir.FunctionType(ir.VoidType(), [_BYTES, _BYTES, count.type, none.type])
        function = builder.inttoptr(team, kind.as_pointer())
        builder.call(function, [builder.inttoptr(kernel, _BYTES), builder.inttoptr(work, _BYTES), count, none])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@instructions
def _call(_: Any, kernel: Any, work: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: list[ir.Value]) -> ir.Value:
        function = builder.inttoptr(arguments[0], ir.FunctionType(ir.VoidType(), [_BYTES]).as_pointer())
        builder.call(function, [builder.inttoptr(arguments[1], _BYTES)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@compiled("void(i8, i8, i8, i8)", nogil=True)
def run_on_team(team: int, num_threads: int, kernel: int, work: int) -> None:
    """Call the kernel at an address, `void (*)(void *)`, with the address of the work on every thread of the team; back
    when all are done. On this thread alone where there is no team."""
    if team == 0 or num_threads == 1:
        _call(kernel, work)
    else:
        _call_on_threads(team, num_threads, kernel, work)


@instructions
def take_unit(_: Any, work: Any) -> Any:
    """The int64 that the work begins with, which is one higher afterwards: no two threads get the same."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: list[ir.Value]) -> ir.Value:
        counter = builder.bitcast(arguments[0], _INDEX.as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(_INDEX, 1), "monotonic")

    return types.int64(types.voidptr), generate


def _at(kind: Any) -> Any:
    """Of an integer: the address that it is."""

    def typed(_: Any, address: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: list[ir.Value]) -> ir.Value:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        pointer: Any = types.CPointer
        return pointer(kind)(types.int64), generate

    return instructions(typed)


bits_at: Final[Any] = _at(types.uint16)
words_at: Final[Any] = _at(types.uint32)
floats_at: Final[Any] = _at(types.float32)
indices_at: Final[Any] = _at(types.int64)
