"""The norm and the MLP of a layer, one class for each form. The form is chosen when the model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from worker.kernels.cpu import RmsNormKernel, kernels_for
from worker.model.linear import Linear, OneDnnLinear

_UNSPLIT: Final = 1 << 15
"""torch runs an operation on fewer elements in one thread (`at::internal::GRAIN_SIZE`)."""
RmsNorm = Callable[[Tensor], Tensor]
"""(num_tokens, hidden_size) -> the same shape and dtype, not in place"""


def rms_norm(weight: Tensor, eps: float, *, deterministic: bool) -> RmsNorm:
    """Return the fastest form for the device and dtype of `weight` (hidden_size,)."""
    if kernels := kernels_for(weight.dtype, weight.device, deterministic=deterministic):
        return RmsNormKernel(kernels, weight, eps)
    if weight.device.type == "cpu":
        return _cpu_rms_norm(weight, eps, exact=deterministic)
    return lambda states: functional.rms_norm(states, weight.shape, weight, eps)


def _cpu_rms_norm(weight: Tensor, eps: float, *, exact: bool) -> RmsNorm:
    """Compute x / sqrt(mean(x^2) + eps) * w in float32, as x / hypot(|x|, sqrt(n eps)) * (sqrt(n) w).

    torch's own norm is ten operations on a CPU, and takes twice as long. `exact` avoids `hypot`: its vectorised body
    and its scalar tail may round differently, so that a row's result would depend on its neighbours.
    """
    size = weight.shape[-1]
    scaled, offset = weight.float() * size**0.5, size * eps
    root = torch.tensor(offset**0.5)

    def norm(states: Tensor) -> Tensor:
        wide = states.to(torch.float32, copy=True)
        length: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        length = length.square_().add_(offset).sqrt_() if exact else length.hypot_(root)
        return wide.div_(length).mul_(scaled).to(states.dtype)

    return norm


@dataclass(frozen=True, slots=True, eq=False)
class PlainMlp:
    """residual + down(silu(gate(x)) * up(x)), with gate and up in one product.

    x and residual (num_tokens, hidden_size). The result may be `residual` itself, written in place, or a new tensor.
    """

    gate_up: Linear
    down: Linear
    activation: Callable[[Tensor], Tensor]
    """See `gated_silu`."""

    def __call__(self, states: Tensor, residual: Tensor) -> Tensor:
        return self.down.add_to(residual, self.activation(self.gate_up(states)))


def gated_silu(device: torch.device, *, deterministic: bool) -> Callable[[Tensor], Tensor]:
    """Return silu(gate) * up for gate and up side by side, (num_tokens, 2 * size) -> (num_tokens, size)."""
    if device.type == "cuda":
        from worker.kernels.triton_ops import gated_silu as fused_silu

        return fused_silu
    silu = invariant_silu if deterministic else functional.silu

    def gated(states: Tensor) -> Tensor:
        gate, up = states.chunk(2, dim=-1)
        return silu(gate).mul_(up)

    return gated


def invariant_silu(states: Tensor) -> Tensor:
    """Return silu(states) (num_rows, size), where no row's bits depend on the other rows or the number of threads.

    torch splits elements over threads across rows, and the scalar end of a part rounds differently from its vectors.
    It does not split a call of fewer than `_UNSPLIT` elements. Within one call, each row ends separately.
    """
    width = min(states.shape[1], _UNSPLIT - 1)
    out = torch.empty_like(states, memory_format=torch.contiguous_format)
    for columns, results in zip(torch.split(states, width, dim=1), torch.split(out, width, dim=1), strict=True):
        num_rows = max(1, (_UNSPLIT - 1) // columns.shape[1])
        for rows, result in zip(torch.split(columns, num_rows), torch.split(results, num_rows), strict=True):
            result.copy_(functional.silu(rows))
    return out


@dataclass(frozen=True, slots=True, eq=False)
class OneDnnMlp:
    """`PlainMlp` with activation and multiplication fused into the products, while their results are in registers.

    Measured on SmolLM2's shapes in bfloat16, two threads: the plain form's time within 3 % for 1 and 8 rows, 0.9 of
    it for 32, 0.7 for 512. Results are rounded once where the plain form rounds twice.
    """

    gate: OneDnnLinear
    up: OneDnnLinear
    down: OneDnnLinear

    def __call__(self, states: Tensor, residual: Tensor) -> Tensor:
        product, gate, up = torch.ops.mkldnn._linear_pointwise, self.gate, self.up
        gated = product(states, gate.packed, gate.bias, "swish", [], "")
        return self.down.add_to(residual, product.binary(states, gated, up.packed, up.bias, "mul"))


Mlp = PlainMlp | OneDnnMlp
