"""The innermost loops over heads in bfloat16, written in the compiler's own terms.

numba spends most of a short loop over arrays on getting in and out of it. Here lengths are constants, sums stay in
registers, and nothing is widened one by one: two bfloat16 that lie side by side are one word of 32 bits,

    word   [ odd element | even element ]      even = word << 16      odd = word & 0xFFFF0000      as float32

so that one vector of words is two vectors of floats. What a head is multiplied with, and what it is added to, lies in
that order too: `halves` are the even elements of a head in float32, then the odd ones.

Addresses carry no lifetime: callers hold the arrays. Strides and pitches are in bytes; `reps` and `size`, the queries
of a KV head and the elements of a head, are constants of the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any, Final

from llvmlite import ir
from numba.core import cgutils, types

from worker.kernels.compiled import instructions

_cgutils: Any = cgutils
_LANES: Final = 16
"""Words of a vector; the compiler cuts it for processors that have shorter ones."""
_NUM_SUMS: Final = 12
"""Vectors of sums that are held at once: no processor with vectors of any kind has less than 16 registers."""
_CACHE_LINE_BYTES: Final = 64
_FLAGS: Final = ("contract", "reassoc", "nsz", "arcp")
_INDEX: Final = ir.IntType(64)
_WORD: Final = ir.IntType(32)
_FLOAT: Final = ir.FloatType()


def keys_at_once(reps: int, size: int) -> int:
    """How many keys `dot_keys` is to be asked for while there are as many: a power of two."""
    return min(1 << (max(1, _NUM_SUMS // reps).bit_length() - 1), _Heads.lanes_of(size))


class _Heads:
    """Writes instructions on vectors of heads."""

    def __init__(self, builder: ir.IRBuilder, size: int) -> None:
        self.builder = builder
        self.half = size // 2
        self.lanes = self.lanes_of(size)
        self.vectors = range(self.half // self.lanes)
        self.floats = ir.VectorType(_FLOAT, self.lanes)
        self.words = ir.VectorType(_WORD, self.lanes)

    @staticmethod
    def lanes_of(size: int) -> int:
        return gcd(size // 2, _LANES)

    def address(self, base: ir.Value, stride: ir.Value, index: ir.Value | int) -> ir.Value:
        index = ir.Constant(_INDEX, index) if isinstance(index, int) else index
        return self.builder.add(base, self.builder.mul(stride, index))

    def load(self, address: ir.Value, offset: int, kind: ir.Type) -> ir.Value:
        return self.builder.load(self._pointer(address, offset, kind), align=4)

    def store(self, value: ir.Value, address: ir.Value, offset: int = 0) -> None:
        self.builder.store(value, self._pointer(address, offset, value.type), align=4)

    def load_head(self, address: ir.Value, vector: int) -> tuple[ir.Value, ir.Value]:
        """A vector of the even and one of the odd elements of a head in bfloat16."""
        words = self.load(address, 4 * self.lanes * vector, self.words)
        even = self.builder.shl(words, ir.Constant(self.words, [16] * self.lanes))
        odd = self.builder.and_(words, ir.Constant(self.words, [0xFFFF0000] * self.lanes))
        return self.builder.bitcast(even, self.floats), self.builder.bitcast(odd, self.floats)

    def halves_offset(self, rep: int, half: int, vector: int) -> int:
        """Bytes from the start of (reps, size) float32 in halves to a vector there."""
        return 4 * ((2 * rep + half) * self.half + self.lanes * vector)

    def splat(self, value: ir.Value) -> ir.Value:
        """One float in every lane."""
        nothing = ir.Constant(self.floats, ir.Undefined)
        one = self.builder.insert_element(nothing, value, ir.Constant(_WORD, 0))
        return self.builder.shuffle_vector(one, nothing, ir.Constant(self.words, [0] * self.lanes))

    def multiply_add(self, total: ir.Value, left: ir.Value, right: ir.Value) -> ir.Value:
        return self.builder.fadd(total, self.builder.fmul(left, right, flags=_FLAGS), flags=_FLAGS)

    def sums(self, vectors: Sequence[ir.Value]) -> ir.Value:
        """n vectors, a power of two up to `lanes` -> one of n floats. Two become one at first, each of half the width:

        [a a a a] [b b b b] [c c c c] [d d d d]  ->  [a a b b] [c c d d]  ->  [a b c d]
        """
        parts, width = list(vectors), self.lanes
        while len(parts) > 1:
            parts = [self._fold(*pair, width) for pair in zip(parts[::2], parts[1::2], strict=True)]
            width //= 2
        (total,) = parts
        while width > 1:
            total = self._fold(total, None, width)
            width //= 2
        return total

    def _fold(self, left: ir.Value, right: ir.Value | None, width: int) -> ir.Value:
        """The upper half of each run of `width` lanes added to the lower one, of `left` and then of `right`."""
        num_lanes = left.type.count * (1 if right is None else 2)
        lower = [lane for lane in range(num_lanes) if lane % width < width // 2]
        right = ir.Constant(left.type, ir.Undefined) if right is None else right
        masks = (ir.Constant(ir.VectorType(_WORD, len(lower)), [lane + by for lane in lower]) for by in (0, width // 2))
        return self.builder.fadd(*(self.builder.shuffle_vector(left, right, mask) for mask in masks), flags=_FLAGS)

    def _pointer(self, address: ir.Value, offset: int, kind: ir.Type) -> ir.Value:
        return self.builder.inttoptr(self.builder.add(address, ir.Constant(_INDEX, offset)), kind.as_pointer())


@instructions
def dot_keys(
    _: Any, queries: Any, keys: Any, stride: Any, scores: Any, pitch: Any, num_keys: Any, reps: Any, size: Any
) -> Any:
    """scores[rep, k] = queries[rep] . keys[k] for k below num_keys, a constant.

    queries (reps, size) float32 in halves; keys (num_keys, size) bfloat16, rows `stride` apart; scores float32, rows
    `pitch` apart.
    """
    count, num_reps, length = num_keys.literal_value, reps.literal_value, size.literal_value

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: list[ir.Value]) -> ir.Value:
        queries, keys, stride, scores, pitch = arguments[:5]
        heads = _Heads(builder, length)
        rows = [heads.address(keys, stride, key) for key in range(count)]
        totals = [[ir.Constant(heads.floats, [0.0] * heads.lanes)] * count for _ in range(num_reps)]
        for vector in heads.vectors:
            loaded = [heads.load_head(row, vector) for row in rows]
            for rep in range(num_reps):
                for half in (0, 1):
                    factors = heads.load(queries, heads.halves_offset(rep, half, vector), heads.floats)
                    for key, parts in enumerate(loaded):
                        totals[rep][key] = heads.multiply_add(totals[rep][key], parts[half], factors)
        for rep in range(num_reps):
            heads.store(heads.sums(totals[rep]), heads.address(scores, pitch, rep))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, num_keys, reps, size), generate


@instructions
def add_values(
    _: Any, sums: Any, weights: Any, pitch: Any, values: Any, stride: Any, num_values: Any, reps: Any, size: Any
) -> Any:
    """sums[rep] += weights[rep, k] * values[k] over k below num_values.

    sums (reps, size) float32 in halves; weights float32, rows `pitch` apart; values (num_values, size) bfloat16, rows
    `stride` apart.
    """
    num_reps, length = reps.literal_value, size.literal_value

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: list[ir.Value]) -> ir.Value:
        sums, weights, pitch, values, stride, num_values = arguments[:6]
        heads = _Heads(builder, length)
        at_once = max(1, _NUM_SUMS // (2 * num_reps))
        for first in heads.vectors[::at_once]:
            vectors = heads.vectors[first : first + at_once]
            places = [(rep, half, vector) for rep in range(num_reps) for half in (0, 1) for vector in vectors]
            totals = [_cgutils.alloca_once(builder, heads.floats) for _ in places]
            for place, total in zip(places, totals, strict=True):
                builder.store(heads.load(sums, heads.halves_offset(*place), heads.floats), total)
            with _cgutils.for_range(builder, num_values) as loop:
                row = heads.address(values, stride, loop.index)
                loaded = {vector: heads.load_head(row, vector) for vector in vectors}
                place_of = builder.shl(loop.index, ir.Constant(_INDEX, 2))
                weight_of = [builder.add(heads.address(weights, pitch, rep), place_of) for rep in range(num_reps)]
                factors = [heads.splat(heads.load(address, 0, _FLOAT)) for address in weight_of]
                for (rep, half, vector), total in zip(places, totals, strict=True):
                    added = heads.multiply_add(builder.load(total), loaded[vector][half], factors[rep])
                    builder.store(added, total)
            for place, total in zip(places, totals, strict=True):
                heads.store(builder.load(total), sums, heads.halves_offset(*place))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, reps, size), generate


@instructions
def prefetch(_: Any, address: Any, stride: Any, num_rows: Any, size: Any) -> Any:
    """Ask for rows of `size` bfloat16, `stride` apart, before they are needed; num_rows is a constant."""
    count, length = num_rows.literal_value, size.literal_value

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: list[ir.Value]) -> ir.Value:
        pointer, heads = ir.IntType(8).as_pointer(), _Heads(builder, length)
        kind = ir.FunctionType(ir.VoidType(), [pointer, _WORD, _WORD, _WORD])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        to_read, to_keep, of_data = (ir.Constant(_WORD, value) for value in (0, 3, 1))
        address, stride = arguments[:2]
        for row in range(count):
            for offset in range(0, 2 * length, _CACHE_LINE_BYTES):
                line = builder.add(heads.address(address, stride, row), ir.Constant(_INDEX, offset))
                builder.call(function, [builder.inttoptr(line, pointer), to_read, to_keep, of_data])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, num_rows, size), generate
