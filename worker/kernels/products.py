"""The layouts of weights in panels, for products in float32: see `products.h`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

_GROUP_INPUTS: Final = 32
"""Inputs of a group of a quantised weight, which divides their number."""


class Product(ctypes.Structure):
    """`Product` of products.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "bias")),
        *((name, ctypes.c_int64) for name in ("num_inputs", "num_outputs", "panel_bytes", "num_bits")),
    )


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedWeight:
    """A weight (out, in) as codes of 8 or 4 bits: scale * code, plus the minimum with 4 bits."""

    codes: NDArray[Any]
    """(out, in): int8, or uint8 of 0..15."""
    scales: NDArray[np.float32]
    """(out, in / 16) with 8 bits, (out, in / 32) with 4"""
    minima: NDArray[np.float32] | None
    """(out, in / 32), only with 4 bits"""

    @property
    def num_bits(self) -> int:
        return 8 if self.minima is None else 4


def to_panels(weight: Tensor, width: int) -> Tensor:
    """Lay a weight (out, in) out in panels of `width` outputs, (ceil(out / width), in, width), the last one padded."""
    num_outputs, num_inputs = weight.shape
    padded = functional.pad(weight, (0, 0, 0, -num_outputs % width))
    return padded.view(-1, width, num_inputs).transpose(1, 2).contiguous()


def to_quantised_panels(weight: QuantisedWeight, width: int) -> Tensor:
    """Lay a quantised weight out in panels of `width` outputs, (ceil(out / width), groups, bytes) uint8.

    A group is `Group` of products.h: the scales of its outputs, their minima, and their codes.
    """
    num_outputs, num_inputs = weight.codes.shape

    def by_group(values: NDArray[Any], num_groups: int) -> NDArray[Any]:
        """(out, in) -> (panels, groups, in / groups, width)"""
        padded = np.pad(values, ((0, -num_outputs % width), (0, 0)))
        return padded.reshape(-1, width, num_groups, values.shape[1] // num_groups).transpose(0, 2, 3, 1)

    num_groups = num_inputs // _GROUP_INPUTS
    codes = by_group(weight.codes, num_groups)
    if weight.num_bits == 4:
        codes = codes[:, :, 0::2] | codes[:, :, 1::2] << 4
    num_panels, _, num_bytes, _ = codes.shape
    words = codes.reshape(num_panels, num_groups, num_bytes // 4, 4, width).swapaxes(3, 4)
    parts = [by_group(weight.scales, num_groups), words]
    if weight.minima is not None:
        parts.insert(1, by_group(weight.minima, num_groups))
    as_bytes = [np.ascontiguousarray(part).view(np.uint8).reshape(num_panels, num_groups, -1) for part in parts]
    return torch.from_numpy(np.concatenate(as_bytes, axis=2))
