"""The compiled norm, rotation and argmax against the same mathematics in torch's float32."""

from __future__ import annotations

import pytest
import torch

from tests.worker.kernels.rounding import close, states
from worker.kernels.cpu import MAX_ROWS, Kernels, RmsNormKernel
from worker.model.rope import compiled_rotation, torch_rotation


@pytest.mark.parametrize("num_rows", [1, 7, MAX_ROWS, MAX_ROWS + 1, 3 * MAX_ROWS])
def test_norm_is_rounded_once(kernels: Kernels, num_rows: int) -> None:
    x, weight, eps = states(num_rows, 72), states(72, seed=1), 1e-5
    x[0] *= 1e-3  # where eps counts
    wide = x.float()
    want = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    assert close(RmsNormKernel(kernels, weight, eps)(x), want)


@pytest.mark.parametrize("num_rows", [3, MAX_ROWS + 37])
@pytest.mark.parametrize("head_dim", [8, 64])
def test_rotation_turns_its_heads_and_no_other(kernels: Kernels, head_dim: int, num_rows: int) -> None:
    table = states(50, 2, head_dim, seed=2)
    positions = torch.tensor([3, 0, 49, *range(num_rows - 3)]) % 50
    x = states(num_rows, 6 * head_dim)
    want = torch_rotation(table.float(), positions)(x.float(), 4)
    rest = x[:, 4 * head_dim :].clone()
    got = compiled_rotation(kernels, table, positions)(x, 4)
    assert got.shape == (num_rows, 4, head_dim)
    assert close(got, want)
    assert torch.equal(x[:, 4 * head_dim :], rest)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_norm_never_hides_what_is_not_finite(kernels: Kernels, broken: float) -> None:
    x = states(2, 16)
    x[1, 3] = broken
    out = RmsNormKernel(kernels, torch.ones(16), 1e-5)(x)
    assert bool(out[0].isfinite().all())
    assert not bool(out[1].isfinite().all())


def test_argmax_is_where_float32_finds_it(kernels: Kernels) -> None:
    x = states(12, 5000, seed=6)
    x[1] = float("-inf")
    x[2, [77, 4000]] = float("inf")
    x[3, 4999] = float("nan")
    x.view(torch.int16)[4, [1024, 1025]] = 0xFFC0 - (1 << 16)  # NaN with its sign set, as processors make it
    x[5] = 1.5
    x[6] = -x[6].abs() - 1
    x[7] = -1
    x[7, [9, 30]] = torch.tensor([-0.0, 0.0]).bfloat16()
    x[8, [2000, 3000]] = 100.0
    assert kernels.argmax(x).tolist() == x.float().numpy().argmax(-1).tolist()
