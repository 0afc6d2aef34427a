"""One token for every row of logits: a pure function of (logits, params, seed, position, the token ids so far).

    raw logits -> logprobs (reported)
               -> constraints -> penalties, bias -> best token                       greedy
                                                 -> / temperature -> truncation -> inverse of the distribution function

The distribution function runs in the order of token ids, not of probabilities: rounding that swaps two nearly equal
tokens then moves no boundary by more than their difference. A row's result does not depend on the other rows.

All of it is queued on the device of the logits, and nothing here looks at a result: whether there was a token to draw
is found out by who reads the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import isfinite
from typing import Final

import torch
from torch import Tensor

from worker.device import to_device, to_host
from worker.engine.step import NonFiniteLogits, NoTokenLeft, SampledToken, SamplingRow
from worker.kernels.cpu import kernels_for
from worker.sampling.constraints import constrain, is_constrained
from worker.sampling.logprobs import LogprobRows, token_logprobs
from worker.sampling.penalties import is_penalised, penalise
from worker.sampling.rules import rules_of
from worker.sampling.truncation import truncate

_MASK: Final = (1 << 64) - 1
_PERSON: Final = b"headstart-draw"
_MANTISSA_BITS: Final = 53
_MIN_TEMPERATURE: Final = 1e-5
"""Below it a draw is greedy in effect, and dividing by less would overflow."""


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What was drawn, still tensors."""

    token_ids: Tensor
    """(rows,)"""
    highest: tuple[Tensor, ...]
    """(rows,) each: the best logit as the model gives it and, if that is not all, as constraints and penalties leave
    it. Where it is not finite there was nothing to draw."""
    logprobs: LogprobRows | None
    logprob_rows: Sequence[int]
    """The rows that `logprobs` belongs to."""

    def to_host(self) -> SamplerOutput:
        """Not to be read before the device is done with what is queued now."""
        logprobs = None if self.logprobs is None else self.logprobs.to_host()
        return SamplerOutput(to_host(self.token_ids), tuple(map(to_host, self.highest)), logprobs, self.logprob_rows)

    def tokens(self) -> list[SampledToken]:
        """Of tensors on the host. Raises NonFiniteLogits when the model's output is not a number, NoTokenLeft when a
        draw forbids every token."""
        for stage, highest in enumerate(self.highest):
            _check(highest, is_adjusted=stage > 0)
        found = [] if self.logprobs is None else self.logprobs.rows()
        logprobs = dict(zip(self.logprob_rows, found, strict=True))
        return [SampledToken(token_id, logprobs.get(row)) for row, token_id in enumerate(self.token_ids.tolist())]


def sample(logits: Tensor, draws: Sequence[SamplingRow], eos_token_ids: Sequence[int]) -> SamplerOutput:
    """Sample from row i of (len(draws), vocab_size) logits as draws[i] says. Calculates in float32; the logits stay as
    they are."""
    token_ids, highest = _best(logits)
    found = [highest]
    adjusted, rows = logits, _adjusted_rows(draws)
    if rows:
        adjusted = _adjust(logits, draws, rows, eos_token_ids)
        token_ids, highest = _best(adjusted)
        found.append(highest)
    if sampled := [row for row, draw in enumerate(draws) if not draw.params.greedy]:
        token_ids[to_device(sampled, torch.int64, logits.device)] = _sample_rows(adjusted, draws, sampled)
    rows = [row for row, draw in enumerate(draws) if draw.params.logprobs is not None]
    return SamplerOutput(token_ids, tuple(found), _logprobs(logits, draws, rows, token_ids), rows)


def _best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(rows,) the most likely token of each row, and its logit: NaN and +inf win every comparison, -inf none."""
    if logits.device.type != "cpu":
        best = logits.argmax(dim=-1)
    elif kernels := kernels_for(logits.dtype, logits.device, deterministic=False):
        best = kernels.argmax(logits)
    else:
        # numpy's search is vectorised where torch's is not: 4 times as fast over a vocabulary, and NaN wins in both.
        best = torch.from_numpy(logits.float().numpy().argmax(axis=-1))
    return best, logits.gather(1, best[:, None]).squeeze(1)


def _check(highest: Tensor, *, is_adjusted: bool) -> None:
    """-inf is the request's doing once its limits have been applied, and the model's before."""
    if not bool(highest.isfinite().all()):
        values = highest.tolist()
        empty = [row for row, value in enumerate(values) if value == float("-inf")]
        if empty and is_adjusted:
            raise NoTokenLeft("the request's limits (allowed ids, bad words, grammar) leave no token to draw", empty)
        raise NonFiniteLogits(
            "the model's logits are not finite", [row for row, value in enumerate(values) if not isfinite(value)]
        )


def _adjusted_rows(draws: Sequence[SamplingRow]) -> list[int]:
    return [row for row, draw in enumerate(draws) if is_constrained(draw) or is_penalised(draw)]


def _adjust(logits: Tensor, draws: Sequence[SamplingRow], rows: Sequence[int], eos_token_ids: Sequence[int]) -> Tensor:
    """A copy of the logits in float32 with constraints and penalties applied to `rows`."""
    adjusted = logits.to(torch.float32, copy=True)
    for row in rows:
        rules = rules_of(draws[row], adjusted[row], eos_token_ids)
        if is_constrained(draws[row]):
            constrain(adjusted[row], draws[row], rules)
        if is_penalised(draws[row]):
            penalise(adjusted[row], draws[row], rules)
    return adjusted


def _sample_rows(logits: Tensor, draws: Sequence[SamplingRow], rows: Sequence[int]) -> Tensor:
    device, params = logits.device, [draws[row].params for row in rows]
    temperatures = to_device([max(p.temperature, _MIN_TEMPERATURE) for p in params], torch.float32, device)
    scaled = logits[to_device(rows, torch.int64, device)].float() / temperatures[:, None]
    truncate(scaled, params)
    uniforms = [uniform(draws[row].seed, draws[row].position) for row in rows]
    cumulated = scaled.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    targets = to_device(uniforms, torch.float64, device)[:, None] * cumulated[:, -1:]
    # right=True: the first token whose cumulated share exceeds the target, so never one of probability 0.
    drawn = torch.searchsorted(cumulated, targets, right=True).squeeze(1)
    return drawn.clamp_(max=logits.shape[1] - 1)  # beyond the end where the logits are not numbers


def _logprobs(
    logits: Tensor, draws: Sequence[SamplingRow], rows: Sequence[int], token_ids: Tensor
) -> LogprobRows | None:
    if not rows:
        return None
    index = to_device(rows, torch.int64, logits.device)
    return token_logprobs(logits[index], token_ids[index], [draws[row].params.logprobs or 0 for row in rows])


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for the token at `position` of a sequence. Seeds count modulo 2**64."""
    counter = (seed & _MASK).to_bytes(8, "little") + position.to_bytes(8, "little")
    digest = blake2b(counter, digest_size=8, person=_PERSON).digest()
    return (int.from_bytes(digest, "little") >> (64 - _MANTISSA_BITS)) / (1 << _MANTISSA_BITS)
