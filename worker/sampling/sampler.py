"""One token for every row of logits: a pure function of (logits, params, seed, position, the token ids so far).

    raw logits -> logprobs (reported)
               -> constraints -> penalties, bias -> best token                       greedy
                                                 -> / temperature -> truncation -> inverse of the distribution function

The distribution function runs in the order of token ids, not of probabilities: rounding that swaps two nearly equal
tokens then moves no boundary by more than their difference. A row's result does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from worker.sampling.constraints import constrain, is_constrained
from worker.sampling.errors import NonFiniteLogits, NoTokenLeft
from worker.sampling.logprobs import token_logprobs
from worker.sampling.penalties import is_penalised, penalise
from worker.sampling.randomness import uniform
from worker.sampling.truncation import truncate
from worker.step import Draw, Drawn
from worker.wire import TokenLogprobs

_MIN_TEMPERATURE: Final = 1e-5
"""Below it a draw is greedy in effect, and dividing by less would overflow."""


def sample(logits: Tensor, draws: Sequence[Draw], eos_token_ids: Sequence[int]) -> list[Drawn]:
    """Draw from row i of (len(draws), vocab_size) float32 logits as draws[i] says. The logits stay as they are.

    Raises NonFiniteLogits when the model's output is not a number, NoTokenLeft when a draw forbids every token.
    """
    best = _best(logits)
    adjusted, rows = logits, _adjusted_rows(draws)
    if rows:
        adjusted = _adjust(logits, draws, rows, eos_token_ids)
        best = _best(adjusted)
    token_ids: list[int] = best.tolist()
    if sampled := [row for row, draw in enumerate(draws) if not draw.params.greedy]:
        for row, token_id in zip(sampled, _sample_rows(adjusted, draws, sampled), strict=True):
            token_ids[row] = token_id
    logprobs = _logprobs(logits, draws, token_ids)
    return [Drawn(token_id, logprobs.get(row)) for row, token_id in enumerate(token_ids)]


def _best(logits: Tensor) -> Tensor:
    """(rows,) the most likely token of each row, checked: NaN and +inf win every comparison, -inf none."""
    # numpy's search is vectorised where torch's is not: 4 times as fast over a vocabulary, and NaN wins in both.
    best = logits.argmax(dim=-1) if logits.is_cuda else torch.from_numpy(logits.numpy().argmax(axis=-1))
    highest = logits.gather(1, best[:, None]).squeeze(1)
    if not bool(highest.isfinite().all()):
        values = highest.tolist()
        empty = [row for row, value in enumerate(values) if value == float("-inf")]
        if empty:
            raise NoTokenLeft("the request's limits (allowed ids, bad words, grammar) leave no token to draw", empty)
        broken = [row for row, value in enumerate(values) if value != value or value == float("inf")]
        raise NonFiniteLogits("the model's logits are not finite", broken)
    return best


def _adjusted_rows(draws: Sequence[Draw]) -> list[int]:
    return [row for row, draw in enumerate(draws) if is_constrained(draw) or is_penalised(draw)]


def _adjust(logits: Tensor, draws: Sequence[Draw], rows: Sequence[int], eos_token_ids: Sequence[int]) -> Tensor:
    """A copy of the logits with constraints and penalties applied to `rows`."""
    adjusted = logits.clone()
    for row in rows:
        if is_constrained(draws[row]):
            constrain(adjusted[row], draws[row], eos_token_ids)
        if is_penalised(draws[row]):
            penalise(adjusted[row], draws[row])
    return adjusted


def _sample_rows(logits: Tensor, draws: Sequence[Draw], rows: Sequence[int]) -> list[int]:
    params = [draws[row].params for row in rows]
    temperatures = torch.tensor([max(p.temperature, _MIN_TEMPERATURE) for p in params], device=logits.device)
    scaled = logits[torch.tensor(rows, device=logits.device)] / temperatures[:, None]
    truncate(scaled, params)
    uniforms = torch.tensor([uniform(draws[row].seed, draws[row].position) for row in rows], dtype=torch.float64)
    cumulated = scaled.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    targets = uniforms.to(logits.device)[:, None] * cumulated[:, -1:]
    # right=True: the first token whose cumulated share exceeds the target, so never one of probability 0.
    drawn: list[int] = torch.searchsorted(cumulated, targets, right=True).squeeze(1).tolist()
    return drawn


def _logprobs(logits: Tensor, draws: Sequence[Draw], token_ids: Sequence[int]) -> dict[int, TokenLogprobs]:
    rows = {row: draw.params.logprobs for row, draw in enumerate(draws) if draw.params.logprobs is not None}
    if not rows:
        return {}
    index = torch.tensor(list(rows), device=logits.device)
    found = token_logprobs(logits[index], [token_ids[row] for row in rows], list(rows.values()))
    return dict(zip(rows, found, strict=True))
