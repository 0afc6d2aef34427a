"""Attention over two disjoint sets of keys from the attention over each."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_partials(one: Tensor, one_lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Outputs (..., head_dim) with their log-sum-exps (...) float32 -> the output over both sets, in the same dtype.

    Source: FlashDecoding's reduction, out = sum of out_i * exp(lse_i - lse).
    """
    share = torch.sigmoid(other_lse.float() - one_lse.float()).unsqueeze(-1)
    return torch.lerp(one.float(), other.float(), share).to(one.dtype)
