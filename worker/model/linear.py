"""Matrix products with weights, one class for each form of a weight. The form is chosen when the model is loaded."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from worker.kernels.cpu import Kernels
from worker.kernels.products import Product
from worker.model.base import QuantisedTensor
from worker.model.quantisation import decode, kind_of

_PACK_ROWS_HINT: Final = 32
"""oneDNN packs a weight for this number of rows. Within noise of the best for 1 to 1024 rows."""
_TILE_ROWS: Final = 32
"""A single decode is hardly slower with this few, and a prefill not at all with this many."""
_GROUP: Final = 32  # values with one scale, in all three kinds
PACKABLE_IN_BFLOAT16: Final = {"Q4_0": 8, "Q4_1": 8, "Q8_0": 4}
"""Most rows, by the kind of a matrix. Measured on SmolLM2's shapes: with more the dense weight is faster."""
_ROW_ALIGNMENT: Final = 16  # torch's packed products take multiples of it


class Linear(ABC):
    """states (rows, in) -> (rows, out), in the dtype of states."""

    @abstractmethod
    def __call__(self, states: Tensor) -> Tensor: ...

    def add_to(self, residual: Tensor, states: Tensor) -> Tensor:
        """Return residual + the product, (rows, out): `residual` itself, written in place, or a new tensor."""
        return residual.add_(self(states))


class DenseLinear(Linear):
    """A plain weight (out, in) with an optional bias (out)."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, states: Tensor) -> Tensor:
        return functional.linear(states, self.weight, self.bias)

    def add_to(self, residual: Tensor, states: Tensor) -> Tensor:
        """Without a bias: one kernel on a GPU, rounded once."""
        return residual.add_(self(states)) if self.bias is not None else residual.addmm_(states, self.weight.t())


class OneDnnLinear(Linear):
    """A dense weight in oneDNN's own blocked layout, for CPUs.

    The plain product converts the layout in every call. Measured on SmolLM2's shapes, one thread: about twice the speed
    in bfloat16, and in float32 1.3 to 2 times for 4 rows or more.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS_HINT)
        self.bias = bias

    def __call__(self, states: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(states, self.packed, self.bias, "none", [], "")
        return product

    def add_to(self, residual: Tensor, states: Tensor) -> Tensor:
        """Add while the product is in registers, and round once."""
        total: Tensor = torch.ops.mkldnn._linear_pointwise.binary(states, residual, self.packed, self.bias, "add")
        return total


class PanelLinear(Linear):
    """A weight in panels, dense or quantised, for products in float32 on a CPU through `cpu.cpp`.

    A quantised weight gives the same bits as its dense form, several times as fast for up to four rows. A row's result
    does not depend on its neighbours. Many processes can map one file of panels.
    """

    def __init__(
        self, kernels: Kernels, panels: Tensor, shape: tuple[int, int], num_bits: int, bias: Tensor | None = None
    ) -> None:
        """`panels`: of `to_panels` (32 bits) or `to_quantised_panels`; `shape` (out, in) is the weight's."""
        self._multiply = kernels.unlocked.multiply
        self._num_outputs, num_inputs = shape
        self._tensors = (panels, bias)  # the fields point into them
        sizes = (num_inputs, self._num_outputs, panels[0].nbytes, num_bits)
        self._fields = Product(panels.data_ptr(), None if bias is None else bias.data_ptr(), *sizes)
        self._address = ctypes.addressof(self._fields)

    def __call__(self, states: Tensor) -> Tensor:
        return self._into(states.new_empty(states.shape[0], self._num_outputs), states, adds=False)

    def add_to(self, residual: Tensor, states: Tensor) -> Tensor:
        """Add in place if `residual` is contiguous."""
        return self._into(residual.contiguous(), states, adds=True)

    def _into(self, out: Tensor, states: Tensor, *, adds: bool) -> Tensor:
        states = states.contiguous()
        num_threads = torch.get_num_threads()
        self._multiply(self._address, states.data_ptr(), out.data_ptr(), states.shape[0], adds, num_threads)
        return out


class TiledLinear(Linear):
    """Any product, run on the same number of rows and on one thread in every call.

    So a row's result depends neither on its neighbours nor on the number of threads: oneDNN splits the sums of a narrow
    product among its threads.
    """

    def __init__(self, inner: Linear) -> None:
        self._inner = inner

    def __call__(self, states: Tensor) -> Tensor:
        num_rows = states.shape[0]
        padded = functional.pad(states, (0, 0, 0, -num_rows % _TILE_ROWS))
        with one_thread():
            return torch.cat([self._inner(tile) for tile in torch.split(padded, _TILE_ROWS)])[:num_rows]


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's operations of this thread on one processor. The switch costs less than a microsecond."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


class PackedLinear(Linear):
    """4-bit and 8-bit weights of GGUF, kept packed for decodes in bfloat16 on a CPU, which memory bounds.

    torch's int4 product takes groups of 32 with a scale and a zero, as a GGUF block has them. Nothing is requantised.
    It computes weights as (q - 8) * scale + zero.

        Q4_1   w = d * q + m                  q in 0..15       ->  scale d,    zero m + 8 d
        Q4_0   w = d * (q - 8)                                 ->  scale d,    zero 0
        Q8_0   w = d * (16 * (hi - 8) + lo)   hi, lo in 0..15  ->  scale 16 d, zero 0  and  scale d, zero 8 d

    An 8-bit matrix is two 4-bit matrices side by side over the same input: (out, in) becomes (out, 2 in). The packed
    product is only fast for a few rows, so `dense` serves larger batches.
    """

    def __init__(self, parts: Sequence[QuantisedTensor], dense: Linear, bias: Tensor | None) -> None:
        """Stack `parts`, for which `is_packable` holds. `dense` includes the bias."""
        weight = decode(parts)
        if weight.minima is not None:
            codes, scales, zeros = weight.codes, weight.scales, weight.minima + 8 * weight.scales
        else:
            shifted = weight.codes.astype(np.int16) + 128
            delta = weight.scales[:, ::2]  # a group of 32 has one
            codes = np.concatenate((shifted >> 4, shifted & 15), axis=1)
            scales = np.concatenate((16 * delta, delta), axis=1)
            zeros = np.concatenate((0 * delta, 8 * delta), axis=1)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.from_numpy(codes.astype(np.int32)), 2)
        # (groups, out, 2), contiguous
        self._scales_and_zeros = (
            torch.from_numpy(np.stack((scales, zeros), axis=-1)).transpose(0, 1).contiguous().bfloat16()
        )
        self._repeats_input = parts[0].kind == "Q8_0"
        self._max_rows = PACKABLE_IN_BFLOAT16[parts[0].kind]
        self._bias = bias
        self.dense = dense

    def __call__(self, states: Tensor) -> Tensor:
        if states.shape[0] > self._max_rows:
            return self.dense(states)
        if self._repeats_input:
            states = torch.cat((states, states), dim=-1)
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            states, self._packed, _GROUP, self._scales_and_zeros
        )
        return product if self._bias is None else product.add_(self._bias)

    def add_to(self, residual: Tensor, states: Tensor) -> Tensor:
        if states.shape[0] > self._max_rows:
            return self.dense.add_to(residual, states)
        return residual.add_(self(states))


def dense_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return the fastest form of a plain weight on its device. It may keep or copy `weight`."""
    if weight.device.type == "cpu" and _onednn_runs(weight.dtype):
        return OneDnnLinear(weight, bias)
    return DenseLinear(weight, bias)


@cache
def _onednn_runs(dtype: torch.dtype) -> bool:
    """Return whether this build and processor have oneDNN's product: half precisions need AVX-512 or newer units."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    weight = torch.eye(8, dtype=dtype)
    try:
        return torch.equal(OneDnnLinear(weight)(weight), weight)
    except (RuntimeError, AttributeError):
        return False


def is_packable(parts: Sequence[QuantisedTensor | None]) -> bool:
    """Return whether these matrices, stacked, can be one PackedLinear."""
    rows = sum(part.shape[0] for part in parts if part is not None)
    return kind_of(parts) in PACKABLE_IN_BFLOAT16 and rows % _ROW_ALIGNMENT == 0
