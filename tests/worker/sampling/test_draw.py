"""The kernels of every instruction set, any number of threads, and numpy draw the same token; limits are exact."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil, e, inf, log, log2
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.worker.kernels.conftest import all_kernels  # noqa: F401
from tests.worker.sampling.cases import exactly_kept, random_logits, random_rows
from worker.contracts.step import SamplingRow
from worker.kernels.cpu import Kernels
from worker.sampling import sampler
from worker.sampling.sampler import sample
from worker.wire import SamplingParams

EOS = (2,)
VOCAB_SIZES = (50, 64, 1000, 4097)


def outcome(logits: torch.Tensor, rows: list[SamplingRow], kernels: Kernels | None) -> list[Any]:
    """Return the token of each row, and its best logits; no token where the best one is not finite."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sampler, "sampling_kernels_for", lambda device: kernels)
        given = logits.clone()
        found = sample(given, rows, EOS)
        assert torch.equal(given, logits), "the logits are restored"
        best = found.best_logits[-1]
        return [torch.where(best.isfinite(), found.token_ids, -1).tolist(), (best + 0.0).tolist()]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), vocab_size=st.sampled_from(VOCAB_SIZES), num_rows=st.integers(1, 6))
def test_all_builds_and_numpy_draw_the_same(
    all_kernels: list[Kernels],  # noqa: F811
    seed: int,
    vocab_size: int,
    num_rows: int,
) -> None:
    logits = torch.from_numpy(random_logits(vocab_size, num_rows, seed))
    rows = random_rows(vocab_size, num_rows, seed)
    want = outcome(logits, rows, None)
    for kernels in all_kernels:
        assert outcome(logits, rows, kernels) == want


@pytest.mark.deep
def test_many_rows_draw_the_same(all_kernels: list[Kernels]) -> None:  # noqa: F811
    for seed in range(3200):
        vocab_size = VOCAB_SIZES[seed % len(VOCAB_SIZES)]
        logits = torch.from_numpy(random_logits(vocab_size, 32, seed))
        rows = random_rows(vocab_size, 32, seed)
        want = outcome(logits, rows, None)
        for kernels in all_kernels:
            with threads(1 + seed % 2):
                assert outcome(logits, rows, kernels) == want, seed


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_threads_and_neighbours_change_nothing(all_kernels: list[Kernels]) -> None:  # noqa: F811
    logits = torch.from_numpy(random_logits(1000, 40, seed=1))
    rows = random_rows(1000, 40, seed=1)
    with threads(1):
        alone = [outcome(logits[row : row + 1], rows[row : row + 1], all_kernels[0]) for row in range(40)]
    for count in (1, 2, 3):
        with threads(count):
            together = outcome(logits, rows, all_kernels[0])
        assert [[[token], [best]] for token, best in zip(*together, strict=True)] == alone


def shares_drawn(logits: NDArray[np.float32], params: SamplingParams, num_draws: int) -> NDArray[np.float64]:
    """Return the share of each token among evenly spaced draws."""
    row = SamplingRow(params, 0, 0, (), ())
    table = torch.from_numpy(logits).expand(num_draws, -1).contiguous()
    numbers = iter([int((at + 0.5) / num_draws * 2**53) for at in range(num_draws)])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sampler, "uniform", lambda seed, position: next(numbers))
        tokens = sample(table, [row] * num_draws, EOS).token_ids
    return np.bincount(tokens.numpy(), minlength=len(logits)) / num_draws


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), vocab_size=st.sampled_from((12, 50, 200)))
def test_draws_have_the_exact_shares(seed: int, vocab_size: int) -> None:
    """Evenly spaced draws hit each kept token as often as its share in float64, and no other."""
    generator = np.random.default_rng(seed)
    logits = random_logits(vocab_size, 1, seed)[0]
    params = SamplingParams(
        max_tokens=1,
        temperature=float(generator.choice([0.3, 0.7, 1.0, 2.0])),
        top_k=int(generator.choice([0, 1, 3, 20])),
        top_p=float(generator.choice([1.0, 0.95, 0.5])),
        min_p=float(generator.choice([0.0, 0.05, 0.5])),
        typical_p=float(generator.choice([1.0, 1.0, 0.9, 0.4])),
    )
    x = logits.astype(np.float64) / params.temperature
    num_draws = 2000
    found = shares_drawn(logits, params, num_draws)
    errors = []
    for slack in (0.0, -1e-6, 1e-6):  # a share that is reached within rounding
        shares = np.where(exactly_kept(logits, params, slack), np.exp(x - x.max()), 0.0)
        errors.append(np.abs(found.cumsum() - (shares / shares.sum()).cumsum()).max())
    assert min(errors) <= 1.5 / num_draws + 1e-6


def test_a_share_needs_the_token_that_reaches_it() -> None:
    """Three tokens of a third each: half of them is two, and ties with the last one are kept."""
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], dtype=np.float32))
    for top_p, num_kept in ((0.5, 1), (0.500001, 2), (0.75, 2), (0.76, 4)):
        found = shares_drawn(logits, SamplingParams(max_tokens=1, top_p=top_p), 64)
        assert int((found > 0).sum()) == num_kept, ceil(top_p)


def test_a_share_may_need_tokens_far_below_the_best() -> None:
    """Three thousand tokens of 2^-9 of the best one's share have six times its share together."""
    logits = np.full(3001, -9 * np.log(2), np.float32)
    logits[0] = 0.0
    assert shares_drawn(logits, SamplingParams(max_tokens=1, top_p=0.5), 64)[0] < 0.2


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 4.0},
        {"presence_penalty": 3.0},
        {"logit_bias": ((5, -3.0), (6, -3.0))},
        {"bad_words": ((5,), (9, 6), (9, 7))},
        {"min_tokens": 99, "stop_token_ids": (7, 8)},
        {"allowed_token_ids": (0, 1, 11)},
    ],
)
def test_a_rule_reaches_each_of_its_tokens(all_kernels: list[Kernels], fields: dict[str, Any]) -> None:  # noqa: F811
    """Each token is the best in one row."""
    logits = torch.full((12, 12), 0.5).fill_diagonal_(1.0)
    row = SamplingRow(SamplingParams(max_tokens=1, temperature=0.0, **fields), 0, 0, (1, 2), (3, 9))
    want = outcome(logits, [row] * 12, None)
    assert want[0] != list(range(12))
    for kernels in all_kernels:
        assert outcome(logits, [row] * 12, kernels) == want


def test_min_p_drops_the_float_below_it(all_kernels: list[Kernels], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(sampler, "uniform", lambda seed, position: (1 << 53) - 1)
    row = SamplingRow(SamplingParams(max_tokens=1, temperature=0.7, min_p=0.05), 0, 0, (), ())
    pairs = []
    for top in np.linspace(1, 9, 32, dtype=np.float32):
        lowest = float(top) + log(0.05) * 0.7
        below = np.float32(lowest)
        pairs.append((top, below if float(below) < lowest else np.nextafter(below, np.float32(-np.inf))))
    for kernels in (None, *all_kernels):
        assert outcome(torch.tensor(pairs), [row] * 32, kernels)[0] == [0] * 32


ONE_BIT = log2(e)
"""The temperature at which a difference of 1 between logits halves a weight."""


def drawn(kernels: Kernels | None, logits: list[float], number: int, **fields: Any) -> int:
    """Return the token of a row for a random number in units of 2^-53."""
    row = SamplingRow(SamplingParams(max_tokens=1, **{"temperature": ONE_BIT, **fields}), 0, 0, (), ())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sampler, "uniform", lambda seed, position: number)
        token_ids, _ = outcome(torch.tensor([logits]), [row], kernels)
    return int(token_ids[0])


LAST = (1 << 53) - 1


def test_limits_and_draws_are_exact_at_their_edges(all_kernels: list[Kernels]) -> None:  # noqa: F811
    two_thirds = ((1 << 54) + 2) // 3 / 2**53  # and a little
    for kernels in (None, *all_kernels):
        # Two blocks have the same sum: half of the numbers are of the second.
        halves = [0.0, *[-inf] * 99, 0.0]
        assert [drawn(kernels, halves, number) for number in ((1 << 52) - 1, 1 << 52)] == [0, 100]
        assert drawn(kernels, [0.0, -1.0], LAST, top_p=two_thirds) == 1
        assert drawn(kernels, [1.0] * 5000 + [0.0] * 5000, LAST, top_k=5000) < 5000
        assert drawn(kernels, [0.0] * 64 + [-49.0] * 64, LAST) == 64
        assert drawn(kernels, [0.0] * 64 + [-50.0] * 64, LAST) == 63


def test_a_weight_is_the_same_to_the_last_bit(all_kernels: list[Kernels]) -> None:  # noqa: F811
    """The first number that draws the second token shows the weight of the first."""
    for step in range(1, 65):
        logits = [-step / 7, 0.0]
        low, high = 0, LAST
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if drawn(None, logits, middle) else (middle + 1, high)
        for kernels in all_kernels:
            assert [drawn(kernels, logits, number) for number in (low - 1, low)] == [0, 1]


def test_best_logprobs_are_found_in_all_blocks(all_kernels: list[Kernels], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    logits = torch.from_numpy(np.random.default_rng(0).permutation(3000).reshape(3, 1000).astype(np.float32) / 300)
    want = logits.log_softmax(-1).topk(5)
    for kernels in all_kernels:
        monkeypatch.setattr(sampler, "sampling_kernels_for", lambda device, kernels=kernels: kernels)
        found = sampler.token_logprobs(logits, logits.argmax(-1), [5] * 3)
        assert torch.equal(found.ids, want.indices)
        torch.testing.assert_close(found.values, want.values)
