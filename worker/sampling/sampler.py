"""Sampling: one token for every row of logits, a pure function of (logits, params, seed, position, the tokens so far).

    raw logits -> logprobs (reported)
               -> rules: constraints, penalties, bias -> best token                       greedy
                                                      -> / temperature -> truncation -> inverse transform sampling

Probabilities are summed in the order of token ids, not of their size. So rounding that swaps two nearly equal tokens
moves no boundary by more than their difference. A row's result does not depend on the other rows.

All work is queued on the device of the logits, and no call here waits for a result. Errors show when the tokens are
read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import isfinite
from typing import Final

import torch
from torch import Tensor

from worker.contracts.step import NonFinite, NoTokenLeft, SampledToken, SamplingRow
from worker.kernels.cpu import kernels_for
from worker.kernels.device import to_device, to_host
from worker.sampling.rules import TokenRules, has_rules
from worker.sampling.truncation import truncate
from worker.wire import TokenLogprobs

_MASK: Final = (1 << 64) - 1  # seeds are 64-bit numbers, also negative ones
_PERSON: Final = b"headstart-draw"
_MANTISSA_BITS: Final = 53  # of a double: each value in [0, 1) is exact
_BROKEN: Final = "the model's logits are not finite"
_MIN_TEMPERATURE: Final = 1e-5
"""A lower temperature is greedy in effect, and dividing by it would overflow."""


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log probabilities of the model's own distribution, before any rule or temperature, as tensors on the host."""

    chosen: Tensor
    """(rows,)"""
    values: Tensor
    """(rows, max of num_top), best first"""
    ids: Tensor
    """The tokens of `values`."""
    ranks: Tensor
    """(rows,) of the chosen, from 1"""
    num_top: Sequence[int]

    def check(self) -> None:
        """Raise NonFinite if a row is NaN, as one logit that is NaN or infinite makes it."""
        if bool(self.chosen.isnan().any()):
            raise NonFinite(_BROKEN)

    def rows(self) -> list[TokenLogprobs]:
        """Read the tensors."""
        ids, values = self.ids.tolist(), self.values.tolist()
        return [
            TokenLogprobs(value, tuple(zip(ids[row][:count], values[row][:count], strict=True)), rank)
            for row, (value, rank, count) in enumerate(
                zip(self.chosen.tolist(), self.ranks.tolist(), self.num_top, strict=True)
            )
        ]


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """Sampled tokens as tensors on the host, which are valid when the device has done the queued work."""

    device_token_ids: Tensor
    """(rows,) for a step that follows"""
    token_ids: Tensor
    """(rows,)"""
    best_logits: tuple[Tensor, ...]
    """(rows,) each: the best raw logit and, if any row has rules, the best after them. Where it is not finite there is
    no token to sample."""
    logprobs: LogprobRows | None
    logprob_rows: Sequence[int]
    """The rows that `logprobs` belong to."""

    def check(self, rows: Sequence[int]) -> None:
        """Raise NonFinite for the model's fault and NoTokenLeft for the request's, in these rows.

        -inf after its rules is the request's; -inf before them, and any other value, is the model's.
        """
        for stage, best_logits in enumerate(self.best_logits):
            if not bool(best_logits.isfinite().all()):
                values = best_logits.tolist()
                if stage > 0 and any(values[row] == float("-inf") for row in rows):
                    raise NoTokenLeft("the request's limits (allowed ids, bad words, grammar) leave no token to draw")
                if not all(isfinite(values[row]) for row in rows):
                    raise NonFinite(_BROKEN)

    def tokens(self) -> list[SampledToken]:
        """Read the tensors. Tokens of rows for which `check` would raise are undefined."""
        found = [] if self.logprobs is None else self.logprobs.rows()
        logprobs = dict(zip(self.logprob_rows, found, strict=True))
        return [SampledToken(token_id, logprobs.get(row)) for row, token_id in enumerate(self.token_ids.tolist())]


def sample(logits: Tensor, rows: Sequence[SamplingRow], eos_token_ids: Sequence[int]) -> SamplerOutput:
    """Sample from row i of (len(rows), vocab_size) logits by rows[i]. Computes in float32, on a copy."""
    token_ids, best_logit = _best(logits)
    best_logits = [best_logit]
    adjusted = logits
    if any(map(has_rules, rows)):
        adjusted = apply_rules(logits, rows, eos_token_ids)
        token_ids, best_logit = _best(adjusted)
        best_logits.append(best_logit)
    if random := [index for index, row in enumerate(rows) if not row.params.greedy]:
        token_ids[to_device(random, torch.int64, logits.device)] = _sample_random(adjusted, rows, random)
    logprobs, with_logprobs = None, [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    if with_logprobs:
        index = to_device(with_logprobs, torch.int64, logits.device)
        num_top = [rows[row].params.logprobs or 0 for row in with_logprobs]
        logprobs = token_logprobs(logits[index], token_ids[index], num_top)
    return SamplerOutput(token_ids, to_host(token_ids), tuple(map(to_host, best_logits)), logprobs, with_logprobs)


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> LogprobRows:
    """For row i of (rows, vocab_size) logits, compute the logprob of token_ids[i] and the num_top[i] best."""
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None]).squeeze(1)
    best = logprobs.topk(min(max(num_top, default=0), logits.shape[1]), dim=-1)
    ranks = (logprobs > chosen[:, None]).sum(dim=-1) + 1
    return LogprobRows(to_host(chosen), to_host(best.values), to_host(best.indices), to_host(ranks), num_top)


def apply_rules(logits: Tensor, rows: Sequence[SamplingRow], eos_token_ids: Sequence[int]) -> Tensor:
    """Return a copy of the logits in float32 with the rules of each row applied."""
    adjusted = logits.to(torch.float32, copy=True)
    for row_logits, row in zip(adjusted, rows, strict=True):
        if has_rules(row):
            TokenRules.for_row(row, eos_token_ids, row_logits).apply(row_logits, row)
    return adjusted


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) for the token at `position` of a sequence. Seeds count modulo 2**64.

    It has no state, so a resumed stream samples the same tokens.
    """
    counter = (seed & _MASK).to_bytes(8, "little") + position.to_bytes(8, "little")
    digest = blake2b(counter, digest_size=8, person=_PERSON).digest()
    return (int.from_bytes(digest, "little") >> (64 - _MANTISSA_BITS)) / (1 << _MANTISSA_BITS)


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


def _sample_random(logits: Tensor, rows: Sequence[SamplingRow], indices: Sequence[int]) -> Tensor:
    device, params = logits.device, [rows[index].params for index in indices]
    temperatures = to_device([max(p.temperature, _MIN_TEMPERATURE) for p in params], torch.float32, device)
    scaled = logits[to_device(indices, torch.int64, device)].float() / temperatures[:, None]
    truncate(scaled, params)
    uniforms = [uniform(rows[index].seed, rows[index].position) for index in indices]
    cumulated = scaled.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    targets = to_device(uniforms, torch.float64, device)[:, None] * cumulated[:, -1:]
    # right=True: the first token whose cumulated share exceeds the target, so never one of probability 0.
    tokens = torch.searchsorted(cumulated, targets, right=True).squeeze(1)
    return tokens.clamp_(max=logits.shape[1] - 1)  # beyond the end where the logits are not finite
