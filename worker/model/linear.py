"""Matrix products with weights in the forms that the engine runs: one class a form, chosen when the model is loaded."""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

_PACK_ROWS_HINT = 32
"""Rows that oneDNN lays a packed weight out for; within noise the best or near it from 1 to 1024 rows."""
_TILE_ROWS = 32
"""Few enough that a decode alone hardly notices, enough that a prefill is not torn to pieces."""


class Linear(Protocol):
    """x (num_tokens, in) -> (num_tokens, out), in x's dtype."""

    def __call__(self, states: Tensor) -> Tensor: ...

    def add_to(self, residual: Tensor, states: Tensor) -> Tensor:
        """residual + the product, (num_tokens, out): `residual` itself, written in place, or a new tensor."""

    @property
    def weight_bytes(self) -> int:
        """What one product reads."""


class DenseLinear:
    """A plain weight (out, in) with an optional bias (out)."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, states: Tensor) -> Tensor:
        return functional.linear(states, self.weight, self.bias)

    def add_to(self, residual: Tensor, states: Tensor) -> Tensor:
        """Without a bias one kernel on a GPU, and rounded once."""
        return residual.add_(self(states)) if self.bias is not None else residual.addmm_(states, self.weight.t())

    @property
    def weight_bytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()


class OneDnnLinear:
    """A dense weight in oneDNN's own blocked layout, for CPUs.

    The plain product lays the weight out anew in every call. Measured on SmolLM2's shapes, one thread: about 2 times
    the speed in bfloat16 at any number of rows, 1.3 to 2 times in float32 from 4 rows on.
    """

    __slots__ = ("bias", "packed", "weight_bytes")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS_HINT)
        self.bias = bias
        self.weight_bytes = weight.numel() * weight.element_size()

    def __call__(self, states: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(states, self.packed, self.bias, "none", [], "")
        return product

    def add_to(self, residual: Tensor, states: Tensor) -> Tensor:
        """Added while the product is in registers, and rounded once."""
        total: Tensor = torch.ops.mkldnn._linear_pointwise.binary(states, residual, self.packed, self.bias, "add")
        return total


class TiledLinear:
    """Any product, always run on the same number of rows, so that a row's result never depends on its neighbours."""

    __slots__ = ("_inner", "weight_bytes")

    def __init__(self, inner: Linear) -> None:
        self._inner = inner
        self.weight_bytes = inner.weight_bytes

    def __call__(self, states: Tensor) -> Tensor:
        num_rows = states.shape[0]
        padded = functional.pad(states, (0, 0, 0, -num_rows % _TILE_ROWS))
        return torch.cat([self._inner(tile) for tile in torch.split(padded, _TILE_ROWS)])[:num_rows]

    def add_to(self, residual: Tensor, states: Tensor) -> Tensor:
        return residual.add_(self(states))


def dense_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest form of a plain weight on its device. `weight` may be kept or copied."""
    if weight.device.type == "cpu" and _onednn_runs(weight.dtype):
        return OneDnnLinear(weight, bias)
    return DenseLinear(weight, bias)


@cache
def _onednn_runs(dtype: torch.dtype) -> bool:
    """Whether this build and this processor have the packed product: half precisions need AVX-512 or newer units."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    weight = torch.eye(8, dtype=dtype)
    try:
        return torch.equal(OneDnnLinear(weight)(weight), weight)
    except (RuntimeError, AttributeError):
        return False
