"""The root mean square norm, in the form that is fast on its device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from worker.kernels.bits import MAX_ROWS, bits, kernels_serve


class RmsNorm(Protocol):
    """x (num_tokens, hidden_size) -> the same shape and dtype, not in place."""

    def __call__(self, states: Tensor) -> Tensor: ...


class CpuRmsNorm:
    """x / sqrt(mean(x^2) + eps) * w, as x / hypot(|x|, sqrt(n eps)) * (sqrt(n) w), in float32: few small operations.

    torch's own norm is ten operations on a CPU, and takes twice as long. `exact` leaves `hypot` out: its vectors and
    what is left over of a vector may round apart, so that a row's result would depend on its neighbours.
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


class CompiledRmsNorm:
    """One loop, or one a thread for many rows, in bfloat16."""

    __slots__ = ("_address", "_few", "_many", "_offset", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        from worker.kernels import bfloat16, rows

        self._few, self._many = bfloat16.rms_norm_at, rows.rms_norm
        size = weight.shape[-1]
        self._weight = (weight.float() * size**0.5).numpy()
        self._address = self._weight.ctypes.data
        self._offset = size * eps

    def __call__(self, states: Tensor) -> Tensor:
        out = torch.empty_like(states)
        if len(states) > MAX_ROWS:
            num_threads = torch.get_num_threads()
            self._many(bits(states), self._weight, self._offset, bits(out), num_threads=num_threads)
        else:
            assert states.is_contiguous()
            self._few(states.data_ptr(), self._address, self._offset, out.data_ptr(), *states.shape)
        return out


class FusedRmsNorm:
    """torch's own norm: one kernel on a GPU."""

    __slots__ = ("_eps", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, states: Tensor) -> Tensor:
        return functional.rms_norm(states, self._weight.shape, self._weight, self._eps)


def rms_norm(weight: Tensor, eps: float, *, deterministic: bool) -> RmsNorm:
    """`weight` (hidden_size) of any floating dtype, on the device that the norm is for."""
    if kernels_serve(weight.dtype, weight.device, deterministic=deterministic):
        return CompiledRmsNorm(weight, eps)
    if weight.device.type == "cpu":
        return CpuRmsNorm(weight, eps, exact=deterministic)
    return FusedRmsNorm(weight, eps)
