"""The compiled product in float32: right, and for each row the same whatever is computed with it, and wherever."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from worker.kernels.cpu import Kernels, ProductKernel, to_panels

SIZES = st.integers(1, 30) | st.integers(30, 1100)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 40) | st.sampled_from((192, 193, 500)), SIZES, SIZES, st.booleans(), st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_row_is_right_and_independent(
    kernels: Kernels, num_rows: int, num_inputs: int, num_outputs: int, has_bias: bool, data: st.DataObject
) -> None:
    weight, bias = random(1, num_outputs, num_inputs), random(2, num_outputs) if has_bias else None
    states, residual = random(3, num_rows, num_inputs), random(4, num_rows, num_outputs)
    product = ProductKernel(kernels, to_panels(weight, kernels.panel_width), num_outputs, bias)

    got = product(states)
    want = states.double() @ weight.double().T + (0 if bias is None else bias.double())
    rounding = 2e-5 * num_inputs**0.5  # of as many sums of about 1
    torch.testing.assert_close(got.double(), want, rtol=0, atol=rounding)

    before = residual.clone()
    added = product.add_to(residual, states)
    assert added.data_ptr() == residual.data_ptr(), "in place"
    torch.testing.assert_close(added, before + got, rtol=0, atol=rounding)

    first = data.draw(st.integers(0, num_rows - 1))
    part = slice(first, data.draw(st.integers(first + 1, num_rows)))
    assert torch.equal(product(states[part]), got[part])
    assert torch.equal(product.add_to(before[part].clone(), states[part]), added[part])


def test_neither_threads_nor_lanes_change_a_result(all_kernels: list[Kernels]) -> None:
    weight, states = random(1, 200, 1500), random(2, 30, 1500)
    results = []
    threads = torch.get_num_threads()
    try:
        for kernels in all_kernels:
            product = ProductKernel(kernels, to_panels(weight, kernels.panel_width), 200, None)
            for num_threads in (1, 2, 5):
                torch.set_num_threads(num_threads)
                results.append(product(states))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


def test_rows_that_are_not_adjacent(kernels: Kernels) -> None:
    weight, wide = random(1, 40, 64), random(2, 5, 128)
    product = ProductKernel(kernels, to_panels(weight, kernels.panel_width), 40, None)
    assert torch.equal(product(wide[:, :64]), product(wide[:, :64].contiguous()))


def test_what_is_not_finite_stays_in_its_row(kernels: Kernels) -> None:
    states = random(1, 4, 16)
    states[1, 3], states[2, 5] = float("nan"), float("inf")
    out = ProductKernel(kernels, to_panels(random(2, 5, 16), kernels.panel_width), 5, None)(states)
    assert out.isfinite().all(1).tolist() == [True, False, False, True]
