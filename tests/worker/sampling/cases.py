"""Random rows of logits, and random settings of requests, with the odd cases among them."""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from worker.contracts.step import SamplingRow
from worker.wire import SamplingParams


def random_logits(vocab_size: int, num_rows: int, seed: int) -> NDArray[np.float32]:
    """Return rows: flat, steep, rounded, equal, nearly all forbidden, in levels, or likely tokens above noise."""
    generator = np.random.default_rng(seed)
    rows = []
    for kind in generator.integers(0, 8, num_rows):
        row = generator.standard_normal(vocab_size) * generator.choice([0.01, 1.0, 3.0, 10.0])
        if kind == 0:
            row[:] = 1.5
        elif kind == 1:
            row[generator.random(vocab_size) < 0.9] = -np.inf
        elif kind == 2:
            row[:] = -np.inf
        elif kind == 3:
            row = np.round(row)
        elif kind == 4:
            row[generator.integers(0, vocab_size, 50)] += generator.uniform(6, 14, 50)
        elif kind == 5:
            row += np.repeat(generator.normal(0, 4, vocab_size // 64 + 1), 64)[:vocab_size]
        row[generator.integers(vocab_size)] = generator.normal()
        rows.append(row)
    return np.array(rows, dtype=np.float32)


def random_params(source: random.Random) -> SamplingParams:
    choose = source.choice
    return SamplingParams(
        max_tokens=99,
        temperature=choose([0.0, 1e-6, 0.3, 0.7, 1.0, 2.0, 5.0, 100.0]),
        top_k=choose([0, 0, 1, 3, 20, 500, 3000]),
        top_p=choose([1.0, 1.0, 0.95, 0.5, 0.01, 0.0, 0.999999]),
        min_p=choose([0.0, 0.0, 0.05, 0.5, 1e-4, 1.0]),
        typical_p=choose([1.0, 1.0, 1.0, 0.9, 0.2]),
        repetition_penalty=choose([1.0, 1.0, 1.3, 0.7]),
        frequency_penalty=choose([0.0, 0.0, 0.5, -1.0]),
        presence_penalty=choose([0.0, 0.0, 1.5]),
        logit_bias=choose([(), (), ((3, 5.0), (4, -100.0), (3, 1.0))]),
        bad_words=choose([(), (), ((5,), (1, 6))]),
        min_tokens=choose([0, 0, 40]),
        allowed_token_ids=choose([None, None, None, tuple(range(0, 40, 3))]),
        logprobs=choose([None, None, 0, 5]),
    )


def random_rows(vocab_size: int, num_rows: int, seed: int = 0) -> list[SamplingRow]:
    source, generator = random.Random(seed), np.random.default_rng(seed)
    masks = [None, None, generator.integers(-(2**31), 2**31, vocab_size // 32 + 1, dtype=np.int64).astype(np.int32)]
    return [
        SamplingRow(
            params=random_params(source),
            seed=source.randrange(2**64),
            position=source.randrange(10_000),
            prompt_ids=(1, 2, 3, 33, 3),
            output_ids=(4, 4, 1, 9),
            allowed=source.choice(masks),
            draft_ids=source.choice([(), (), (4, 7)]),
        )
        for _ in range(num_rows)
    ]


def exactly_kept(
    logits: NDArray[np.float32], params: SamplingParams, slack: float = 0.0, entropy_slack: float = 0.0
) -> NDArray[np.bool_]:
    """Return which tokens are kept, in float64 and by sorting, with shares and an entropy that are larger by these."""
    x = logits.astype(np.float64) / params.temperature
    kept = x > -np.inf
    if 0 < params.top_k < kept.sum():
        kept &= x >= np.sort(x)[-params.top_k]
    shares = np.where(kept, np.exp(x - x.max()), 0.0)
    if params.top_p < 1:
        kept &= x >= _last(x, -x, shares, params.top_p + slack)
    if params.min_p > 0:
        kept &= x >= x.max() + np.log(params.min_p)
    if params.typical_p < 1:
        shares = np.where(kept, shares, 0.0) / shares[kept].sum()
        surprise = -np.log(np.where(shares > 0, shares, 1.0))
        distance = np.where(kept, np.abs(surprise - (shares * surprise).sum() - entropy_slack), np.inf)
        kept &= distance <= _last(distance, distance, shares, params.typical_p + slack)
    return kept


def _last(values: NDArray[np.float64], keys: NDArray[np.float64], shares: NDArray[np.float64], share: float) -> float:
    order = np.argsort(keys, kind="stable")
    cumulated = shares[order].cumsum()
    return float(values[order[min(np.searchsorted(cumulated, share * cumulated[-1]), len(order) - 1)]])
