"""Rotary position embedding with its long-context variants: one table of cosines and sines, indexed by position."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

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
    if rope.kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / rope.theta**exponents, 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # half a second, which most models save

    config = SimpleNamespace(
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        rope_parameters={"rope_theta": rope.theta, **rope.parameters},
        standardize_rope_params=lambda: None,  # they are
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"))
    return frequencies, scale
