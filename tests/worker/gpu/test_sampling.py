"""Draws and rules of a batch, compiled for this GPU or interpreted, are those of a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.worker.sampling.cases import random_logits, random_rows
from worker.kernels import triton_sampling
from worker.sampling import reference
from worker.sampling.sampler import apply_edits, edits_of

pytestmark = pytest.mark.gpu
EOS = (2,)


@pytest.mark.parametrize("vocab_size", [50, 1000, 3000])
def test_draws_equal_those_of_the_reference(device: str, vocab_size: int) -> None:
    """A GPU rounds its weights otherwise: a draw within 1e-5 of a boundary may take the next token."""
    rows = [row for row in random_rows(vocab_size, 8) if not row.params.greedy]
    logits = torch.from_numpy(random_logits(vocab_size, len(rows), seed=vocab_size))
    rules, edits = edits_of(rows, EOS, vocab_size)
    ruled = apply_edits(logits.to(device), rules, edits)
    assert torch.equal(ruled.cpu(), apply_edits(logits, rules, edits))
    limits = [rule.limits for rule in rules]
    draws = [int(number * 2**53) for number in np.random.default_rng(vocab_size).random(len(rows))]
    got = triton_sampling.draw(ruled, limits, draws).tolist()
    near = [
        {reference.draw(row, limit, min(max(number + step, 0), 2**53 - 1)) for step in (-(2**37), 0, 2**37)}
        for row, limit, number in zip(ruled.cpu().numpy(), limits, draws, strict=True)
    ]
    is_left = ruled.isfinite().any(dim=1).tolist()
    assert [each for each, tokens, left in zip(got, near, is_left, strict=True) if left and each not in tokens] == []
