"""The root mean square norm, in the form that is fast on its device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from worker.kernels.cpu import RmsNormKernel, kernels_for


class RmsNorm(Protocol):
    """x (num_tokens, hidden_size) -> the same shape and dtype, not in place."""

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
