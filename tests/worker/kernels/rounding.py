"""The tolerance of bfloat16 against the same mathematics in float32."""

from __future__ import annotations

import torch
from torch import Tensor

HALF_STEP = 2.0**-8
"""A bfloat16 has 8 bits: rounding to the nearest moves it by no more than this part of itself."""


def close(got: Tensor, want: Tensor, steps: float = 1.0) -> bool:
    """Return whether bfloat16 `got` is float32 `want`, rounded, give or take float32's own last bits."""
    return bool(((got.float() - want).abs() <= steps * HALF_STEP * want.abs() + 4e-6).all())


def states(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
