"""GGUF's 4-bit and 8-bit weights kept packed for decoding on CPU, where a product takes the time of reading weights.

torch's int4 product takes groups of 32 with a scale and a zero: just what a GGUF block holds, no requantisation.

    Q4_1   w = d * q + m                  q in 0..15       ->  scale d,    zero m + 8 d
    Q4_0   w = d * (q - 8)                                 ->  scale d,    zero 0
    Q8_0   w = d * (16 * (hi - 8) + lo)   hi, lo in 0..15  ->  scale 16 d, zero 0  and  scale d, zero 8 d

An 8-bit matrix is two 4-bit matrices side by side that both multiply the same input: (out, in) becomes (out, 2 in).
torch's kernel computes weights as (q - 8) * scale + zero. It is fast in bfloat16 alone, and for a few rows alone, so
that every packed weight has a dense twin for larger batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from worker.model.checkpoint import QuantisedTensor
from worker.model.linear import Linear

GROUP: Final = 32
PACKABLE: Final = frozenset({"Q4_0", "Q4_1", "Q8_0"})
_MAX_ROWS: Final = {"Q4_0": 8, "Q4_1": 8, "Q8_0": 4}
"""Measured on SmolLM2's shapes: with more rows the dense twin is faster."""
_ROW_ALIGNMENT: Final = 16


@dataclass(frozen=True, slots=True)
class _Groups:
    """`codes` (out, in') 0..15 uint8, `scales` and `zeros` (out, in' / 32) float32"""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray


class PackedLinear:
    """Up to a few rows through the packed weight, more through its dense twin. Activations are bfloat16."""

    __slots__ = ("_bias", "_max_rows", "_packed", "_repeats_input", "_scales_and_zeros", "dense", "weight_bytes")

    def __init__(self, parts: Sequence[QuantisedTensor], dense: Linear, bias: Tensor | None) -> None:
        """`parts` are stacked one below the other; `is_packable` must hold. `dense` includes the bias."""
        groups = [_unpack(part) for part in parts]
        codes = torch.from_numpy(np.concatenate([group.codes for group in groups]).astype(np.int32))
        scales, zeros = (
            torch.from_numpy(np.concatenate([getattr(group, name) for group in groups])) for name in ("scales", "zeros")
        )
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2)
        # (groups, out, 2)
        self._scales_and_zeros = torch.stack((scales, zeros), dim=-1).transpose(0, 1).contiguous().bfloat16()
        self._repeats_input = parts[0].kind == "Q8_0"
        self._max_rows = _MAX_ROWS[parts[0].kind]
        self._bias = bias
        self.dense = dense
        self.weight_bytes = self._packed.nbytes + self._scales_and_zeros.nbytes

    def __call__(self, states: Tensor) -> Tensor:
        if states.shape[0] > self._max_rows:
            return self.dense(states)
        if self._repeats_input:
            states = torch.cat((states, states), dim=-1)
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            states, self._packed, GROUP, self._scales_and_zeros
        )
        return product if self._bias is None else product.add_(self._bias)

    def add_to(self, residual: Tensor, states: Tensor) -> Tensor:
        if states.shape[0] > self._max_rows:
            return self.dense.add_to(residual, states)
        return residual.add_(self(states))


def is_packable(parts: Sequence[QuantisedTensor | None]) -> bool:
    """Whether these matrices, stacked, can be one PackedLinear."""
    kinds = {None if part is None else part.kind for part in parts}
    if len(kinds) != 1 or not kinds <= PACKABLE:
        return False
    rows = sum(part.shape[0] for part in parts if part is not None)
    return rows % _ROW_ALIGNMENT == 0


def _unpack(part: QuantisedTensor) -> _Groups:
    rows, columns = part.shape
    blocks = np.ascontiguousarray(part.data).reshape(rows, columns // GROUP, -1)
    delta = blocks[:, :, :2].copy().view(np.float16)[..., 0].astype(np.float32)
    if part.kind == "Q8_0":
        shifted = (blocks[:, :, 2:].view(np.int8).astype(np.int16) + 128).reshape(rows, columns)
        codes = np.concatenate((shifted >> 4, shifted & 15), axis=1).astype(np.uint8)
        return _Groups(
            codes, np.concatenate((16 * delta, delta), axis=1), np.concatenate((0 * delta, 8 * delta), axis=1)
        )
    header = 4 if part.kind == "Q4_1" else 2
    nibbles = blocks[:, :, header:]
    codes = np.concatenate((nibbles & 15, nibbles >> 4), axis=2).reshape(rows, columns)
    if part.kind == "Q4_0":
        return _Groups(codes, delta, np.zeros_like(delta))
    minimum = blocks[:, :, 2:4].copy().view(np.float16)[..., 0].astype(np.float32)
    return _Groups(codes, delta, minimum + 8 * delta)
