"""The quantised matrices of GGUF files as codes, scales and minima, without a rounding.

Q8_0   scale * code                   code -128..127
Q6_K   scale * code                   code -32..31, a scale for 16 inputs
Q4_0   scale * (code - 8)             code 0..15
Q4_1   scale * code + minimum
Q4_K   scale * code - minimum
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import gguf
import numpy as np
from numpy.typing import NDArray

from worker.kernels.products import QuantisedWeight
from worker.model.base import QuantisedTensor

Blocks = NDArray[np.uint8]
"""(rows, blocks of a row, bytes of a block)"""
NUM_BITS: Final = {"Q8_0": 8, "Q6_K": 8, "Q4_0": 4, "Q4_1": 4, "Q4_K": 4}
"""Bits of a code, by the kind of a matrix."""
PANEL_BITS: Final = {8: 10, 4: 6}
"""Bits that a weight takes in panels, by those of its code: with its part of the scales and minima."""
_ONES_OF_Q4_K: Final = (1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1)
"""The packed scales of a block whose scales are 1 and whose minima are 0."""


def decode(parts: Sequence[QuantisedTensor]) -> QuantisedWeight:
    """Stack matrices of one kind, which is one of `NUM_BITS`, over the same inputs."""
    kind, data = parts[0].kind, np.concatenate([part.data for part in parts])
    _, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return _DECODERS[kind](data.reshape(len(data), -1, block_bytes))


def kind_of(parts: Sequence[QuantisedTensor | None]) -> str:
    """Return the kind that all parts have; '' if they differ, or one is not quantised."""
    kinds = {"" if part is None else part.kind for part in parts}
    return kinds.pop() if len(kinds) == 1 else ""


def _floats(blocks: Blocks, at: int) -> NDArray[np.float32]:
    """Return the float16 at this byte of each block, (rows, blocks)."""
    halves = np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)
    return halves[:, :, 0].astype(np.float32)


def _rows(values: NDArray[Any]) -> NDArray[Any]:
    """(rows, blocks, values of a block) -> (rows, values)"""
    return values.reshape(len(values), -1)


def _nibbles(blocks: Blocks) -> NDArray[np.uint8]:
    return _rows(np.concatenate((blocks & 15, blocks >> 4), axis=2))


def _q8_0(blocks: Blocks) -> QuantisedWeight:
    return QuantisedWeight(_rows(blocks[:, :, 2:]).view(np.int8), np.repeat(_floats(blocks, 0), 2, axis=1), None)


def _q4_0(blocks: Blocks) -> QuantisedWeight:
    scales = _floats(blocks, 0)
    return QuantisedWeight(_nibbles(blocks[:, :, 2:]), scales, -8 * scales)


def _q4_1(blocks: Blocks) -> QuantisedWeight:
    return QuantisedWeight(_nibbles(blocks[:, :, 4:]), _floats(blocks, 0), _floats(blocks, 2))


def _q4_k(blocks: Blocks) -> QuantisedWeight:
    rows, num_blocks, _ = blocks.shape
    of_scales, of_minima = gguf.quants.Q4_K.get_scale_min(blocks[:, :, 4:16].reshape(-1, 12))
    shape = (rows, num_blocks, 8)
    scales = _floats(blocks, 0)[:, :, None] * of_scales.reshape(shape).astype(np.float32)
    minima = _floats(blocks, 2)[:, :, None] * of_minima.reshape(shape).astype(np.float32)
    header = np.concatenate((_bytes_of(1.0), _bytes_of(0.0), np.array(_ONES_OF_Q4_K, dtype=np.uint8)))
    codes = _dequantised("Q4_K", blocks, slice(0, 16), header).astype(np.uint8)
    return QuantisedWeight(codes, _rows(scales), _rows(-minima))


def _q6_k(blocks: Blocks) -> QuantisedWeight:
    scales = _floats(blocks, 208)[:, :, None] * blocks[:, :, 192:208].view(np.int8).astype(np.float32)
    footer = np.concatenate((np.ones(16, dtype=np.uint8), _bytes_of(1.0)))
    codes = _dequantised("Q6_K", blocks, slice(192, 210), footer).astype(np.int8)
    return QuantisedWeight(codes, _rows(scales), None)


def _bytes_of(value: float) -> NDArray[np.uint8]:
    return np.array([value], dtype=np.float16).view(np.uint8)


def _dequantised(kind: str, blocks: Blocks, where: slice, scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise blocks with other scales: with ones, what comes out are the codes."""
    blocks = blocks.copy()
    blocks[:, :, where] = scales
    values: NDArray[np.float32] = gguf.dequantize(_rows(blocks), gguf.GGMLQuantizationType[kind])
    return values


_DECODERS: Final[Mapping[str, Callable[[Blocks], QuantisedWeight]]] = {
    "Q8_0": _q8_0,
    "Q6_K": _q6_k,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
}
