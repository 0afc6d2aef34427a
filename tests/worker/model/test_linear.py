from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.testing import assert_close

from worker.model.linear import DenseLinear, Linear, OneDnnLinear, TiledLinear


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("form", [DenseLinear, OneDnnLinear, lambda *parts: TiledLinear(DenseLinear(*parts))])
@torch.inference_mode()
def test_a_product_is_added_to_what_is_there(form: Callable[..., Linear], has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, states, residual = (torch.randn(size, generator=generator) for size in ((24, 16), (5, 16), (5, 24)))
    bias = torch.randn(24, generator=generator) if has_bias else None
    linear = form(weight, bias)
    wanted = residual + linear(states)
    assert_close(linear(states), states @ weight.T + (0 if bias is None else bias))
    assert_close(linear.add_to(residual, states), wanted)
