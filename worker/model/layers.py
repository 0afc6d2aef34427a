"""The norm and the MLP of a layer, one class for each form. The form is chosen when the model is loaded."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from worker.attention.base import ForwardBatch
from worker.kernels.cpu import RmsNormKernel, kernels_for
from worker.model.linear import Linear, OneDnnLinear


class RmsNorm(Protocol):
    """(num_tokens, hidden_size) -> the same shape and dtype, not in place"""

    def __call__(self, states: Tensor) -> Tensor: ...


class CpuRmsNorm:
    """x / sqrt(mean(x^2) + eps) * w in float32, as x / hypot(|x|, sqrt(n eps)) * (sqrt(n) w).

    torch's own norm is ten operations on a CPU, and takes twice as long. `exact` avoids `hypot`: its vectorised body
    and its scalar tail may round differently, so that a row's result would depend on its neighbours.
    """

    __slots__ = ("_exact", "_offset", "_root", "_weight")

    def __init__(self, weight: Tensor, eps: float, *, exact: bool) -> None:
        size = weight.shape[-1]
        self._weight = weight.float() * size**0.5
        self._offset = size * eps
        self._root = torch.tensor(self._offset**0.5)
        self._exact = exact

    def __call__(self, states: Tensor) -> Tensor:
        wide = states.to(torch.float32, copy=True)
        length: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        length = length.square_().add_(self._offset).sqrt_() if self._exact else length.hypot_(self._root)
        return wide.div_(length).mul_(self._weight).to(states.dtype)


class FusedRmsNorm:
    """torch's own norm, one kernel on a GPU."""

    __slots__ = ("_eps", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, states: Tensor) -> Tensor:
        return functional.rms_norm(states, self._weight.shape, self._weight, self._eps)


def rms_norm(weight: Tensor, eps: float, *, deterministic: bool) -> RmsNorm:
    """Return the fastest form for the device and dtype of `weight` (hidden_size,)."""
    if kernels := kernels_for(weight.dtype, weight.device, deterministic=deterministic):
        return RmsNormKernel(kernels, weight, eps)
    if weight.device.type == "cpu":
        return CpuRmsNorm(weight, eps, exact=deterministic)
    return FusedRmsNorm(weight, eps)


class Mlp(Protocol):
    """residual + down(silu(gate(x)) * up(x)); x and residual (num_tokens, hidden_size).

    The result may be `residual` itself, written in place, or a new tensor.
    """

    def __call__(self, states: Tensor, residual: Tensor, batch: ForwardBatch) -> Tensor: ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one call reads."""


class PlainMlp:
    """Gate and up in one product of any form, then the activation and the multiplication as operations of their own."""

    __slots__ = ("_down", "_gate_up", "weight_bytes")

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up = gate_up
        self._down = down
        self.weight_bytes = gate_up.weight_bytes + down.weight_bytes

    def __call__(self, states: Tensor, residual: Tensor, batch: ForwardBatch) -> Tensor:
        gate, up = self._gate_up(states, batch).chunk(2, dim=-1)
        return self._down.add_to(residual, functional.silu(gate).mul_(up), batch)


class OneDnnMlp:
    """Activation and multiplication fused into the products, while their results are in registers.

    Measured on SmolLM2's shapes in bfloat16, two threads: within 3 % of the plain form for 1 and 8 rows, 0.9 times
    its time for 32 and 0.7 times for 512. Results are rounded once where the plain form rounds twice.
    """

    __slots__ = ("_down", "_gate", "_up", "weight_bytes")

    def __init__(self, gate: OneDnnLinear, up: OneDnnLinear, down: OneDnnLinear) -> None:
        self._gate = gate
        self._up = up
        self._down = down
        self.weight_bytes = gate.weight_bytes + up.weight_bytes + down.weight_bytes

    def __call__(self, states: Tensor, residual: Tensor, batch: ForwardBatch) -> Tensor:
        product, gate, up = torch.ops.mkldnn._linear_pointwise, self._gate, self._up
        gated = product(states, gate.packed, gate.bias, "swish", [], "")
        return self._down.add_to(residual, product.binary(states, gated, up.packed, up.bias, "mul"), batch)
