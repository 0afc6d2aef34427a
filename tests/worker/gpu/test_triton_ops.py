"""The rotation, the write to the pool and the gate, compiled for this GPU or interpreted, give what torch gives."""

from __future__ import annotations

import pytest
import torch

from tests.worker.gpu.fused import fused_differences

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 4e-2}


@pytest.mark.parametrize("heads", [(16, 4, 4), (32, 4, 2), (64, 9, 3), (80, 9, 9), (128, 32, 8), (256, 8, 1)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_they_equal_operations_of_torch(device: str, dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    found = fused_differences(*heads, device, dtype)
    assert {name: error for name, error in found.items() if not error < TOLERANCE[dtype]} == {}
