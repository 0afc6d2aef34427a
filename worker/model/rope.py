"""Rotary position embedding with its long-context variants: one table of cosines and sines, indexed by position."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from worker.kernels.cpu import Kernels, kernels_for
from worker.model.config import RopeConfig

Rotation = Callable[[Tensor, int], Tensor]
"""(num_tokens, width), n -> its first n heads, rotated, (num_tokens, n, head_dim). It may work in place."""


Rope = Callable[[Tensor], Rotation]
"""positions (num_tokens,) -> the rotation of every layer of one step"""


def torch_rotation(table: Tensor, positions: Tensor) -> Rotation:
    """Rotate in operations of torch. `table` of `rope_table` is on the model's device and in its dtype."""
    cos, sin = table[positions].unsqueeze(2).unbind(1)  # (num_tokens, 1, head_dim) each
    head_dim = cos.shape[-1]

    def rotate(states: Tensor, num_heads: int) -> Tensor:
        heads = states[:, : num_heads * head_dim].view(len(states), num_heads, head_dim)
        return torch.addcmul(heads * cos, heads.roll(head_dim // 2, dims=-1), sin)

    return rotate


def compiled_rotation(kernels: Kernels, table: Tensor, positions: Tensor) -> Rotation:
    """Rotate in one compiled loop in bfloat16 on a CPU, in place."""
    rows = table[positions]  # (num_tokens, 2, head_dim)
    head_dim = rows.shape[2]

    def rotate(states: Tensor, num_heads: int) -> Tensor:
        assert states.is_contiguous()
        kernels.rotate(states, rows, num_heads)
        return states[:, : num_heads * head_dim].view(len(states), num_heads, head_dim)

    return rotate


def make_rope(table: Tensor, *, deterministic: bool) -> Rope:
    """Return the fastest form for the device and dtype of `table`: on a GPU, one Triton kernel."""
    if table.is_cuda:
        from worker.kernels.triton_ops import rotate

        return lambda positions: lambda states, num_heads: rotate(states, positions, table, num_heads)
    if kernels := kernels_for(table.dtype, table.device, deterministic=deterministic):
        return partial(compiled_rotation, kernels, table)
    return partial(torch_rotation, table)


def rope_table(rope: RopeConfig, head_dim: int, max_len: int, factors: Tensor | None = None) -> Tensor:
    """Return cosines and signed sines, (max_len, 2, head_dim) float32, for x * cos + (x with swapped halves) * sin.

    The first half of each sine is negated, so that a rotation needs no negation. `factors` (head_dim / 2), as GGUF
    stores them for Llama 3, divide the frequencies.
    """
    frequencies, scale = _inverse_frequencies(rope, head_dim)
    if factors is not None:
        frequencies = frequencies / factors.float()
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)), dim=1).contiguous()


def _inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return (head_dim / 2) float32 frequencies, and the factor on cosine and sine."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "yarn":
        return _yarn(frequencies, rope, head_dim)
    if rope.kind == "llama3":
        return _llama3(frequencies, rope), 1.0
    return frequencies / rope.factor if rope.kind == "linear" else frequencies, 1.0


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Divide long wavelengths by the factor and keep short ones, with a ramp between. Source: the Llama 3.1 release."""
    wavelengths = 2 * math.pi / frequencies
    smooth = (rope.original_max_len / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * frequencies / rope.factor + smooth * frequencies


def _yarn(frequencies: Tensor, rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Interpolate by parts. Source: YaRN (arXiv 2309.00071), section 3.2 and equation 22."""

    def dimension(num_rotations: float) -> float:
        return (head_dim * math.log(rope.original_max_len / (num_rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    scaled = frequencies / rope.factor * ramp + frequencies * (1 - ramp)
    if rope.attention_factor is not None:
        return scaled, rope.attention_factor
    return scaled, 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
