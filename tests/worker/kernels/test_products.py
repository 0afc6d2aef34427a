"""The compiled product in float32: right, and for each row the same whatever is computed with it, and wherever."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.worker.quantised import quantised
from worker.kernels.cpu import Kernels
from worker.kernels.products import to_panels, to_quantised_panels
from worker.model.linear import PanelLinear
from worker.model.quantisation import NUM_BITS, decode

SIZES = st.integers(1, 30) | st.integers(30, 1100)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dense(kernels: Kernels, weight: Tensor, bias: Tensor | None = None) -> PanelLinear:
    return PanelLinear(kernels, to_panels(weight, kernels.panel_width), tuple(weight.shape), 32, bias)


@given(st.integers(1, 40) | st.sampled_from((192, 193, 500)), SIZES, SIZES, st.booleans(), st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_row_is_right_and_independent(
    kernels: Kernels, num_rows: int, num_inputs: int, num_outputs: int, has_bias: bool, data: st.DataObject
) -> None:
    weight, bias = random(1, num_outputs, num_inputs), random(2, num_outputs) if has_bias else None
    states, residual = random(3, num_rows, num_inputs), random(4, num_rows, num_outputs)
    product = dense(kernels, weight, bias)

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
            product = dense(kernels, weight)
            for num_threads in (1, 2, 5):
                torch.set_num_threads(num_threads)
                results.append(product(states))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


def test_rows_that_are_not_adjacent(kernels: Kernels) -> None:
    weight, wide = random(1, 40, 64), random(2, 5, 128)
    product = dense(kernels, weight)
    assert torch.equal(product(wide[:, :64]), product(wide[:, :64].contiguous()))


def test_what_is_not_finite_stays_in_its_row(kernels: Kernels) -> None:
    states = random(1, 4, 16)
    states[1, 3], states[2, 5] = float("nan"), float("inf")
    out = dense(kernels, random(2, 5, 16))(states)
    assert out.isfinite().all(1).tolist() == [True, False, False, True]


@given(
    st.sampled_from(sorted(NUM_BITS)),
    st.integers(1, 40) | st.sampled_from((192, 193, 400)),
    st.integers(1, 6),
    st.lists(st.integers(1, 150), min_size=1, max_size=3),
    st.booleans(),
    st.integers(1, 5),
)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_quantised_weights_give_the_bits_of_dense_ones(
    kernels: Kernels, kind: str, num_rows: int, num_blocks: int, rows: list[int], has_bias: bool, num_threads: int
) -> None:
    parts, weights = zip(*(quantised(kind, each, num_blocks, seed) for seed, each in enumerate(rows)), strict=True)
    weight = torch.cat(weights)
    num_outputs, num_inputs = weight.shape
    bias = random(2, num_outputs) if has_bias else None
    states, residual = random(3, num_rows, num_inputs), random(4, num_rows, num_outputs)
    data = to_quantised_panels(decode(parts), kernels.panel_width)
    product = PanelLinear(kernels, data, (num_outputs, num_inputs), NUM_BITS[kind], bias)
    wanted = dense(kernels, weight, bias)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        assert torch.equal(product(states), wanted(states))
        assert torch.equal(product.add_to(residual.clone(), states), wanted.add_to(residual, states))
    finally:
        torch.set_num_threads(threads)


def test_a_broken_scale_is_noticed(kernels: Kernels) -> None:
    part, _ = quantised("Q4_1", 40, 2)
    part.data[3, :2] = np.array([np.nan], dtype=np.float16).view(np.uint8)
    data = to_quantised_panels(decode([part]), kernels.panel_width)
    for num_rows in (1, 20):
        out = PanelLinear(kernels, data, (40, 64), 4)(random(1, num_rows, 64))
        assert out.isfinite().all(0).tolist() == [output != 3 for output in range(40)]
