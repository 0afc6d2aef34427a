"""Sampling: one token for every row of logits, a pure function of (logits, params, seed, position, the tokens so far).

    raw logits -> logprobs (reported)
               -> rules: constraints, penalties, bias -> best token                       greedy
                                                      -> / temperature -> limits -> inverse transform sampling

A row's result does not depend on the other rows. On a CPU it is the same with every instruction set, without a compiler
and for any number of threads. All work is queued on the device of the logits, and no call here waits for a result.
Errors show when the tokens are read.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import numpy as np
import torch
from torch import Tensor

from worker.contracts.step import NonFinite, NoTokenLeft, SampledToken, SamplingRow
from worker.kernels.cpu import UNIFORM_BITS, kernels_for, sampling_kernels_for
from worker.kernels.device import to_device, to_host
from worker.sampling.reference import draw
from worker.sampling.rules import FORBIDDEN, Edits, TokenRules
from worker.wire import TokenLogprobs

_MASK: Final = (1 << 64) - 1  # seeds are 64-bit numbers, also negative ones
_PERSON: Final = b"headstart-draw"
DRAWS: Final = "draws-2"
"""The version of the tokens that seeds draw. It is a part of a worker's numerics class."""
_BROKEN: Final = "the model's logits are not finite"


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
                if not all(math.isfinite(values[row]) for row in rows):
                    raise NonFinite(_BROKEN)

    def tokens(self) -> list[SampledToken]:
        """Read the tensors. Tokens of rows for which `check` would raise are undefined."""
        found = [] if self.logprobs is None else self.logprobs.rows()
        logprobs = dict(zip(self.logprob_rows, found, strict=True))
        return [SampledToken(token_id, logprobs.get(row)) for row, token_id in enumerate(self.token_ids.tolist())]


def sample(logits: Tensor, rows: Sequence[SamplingRow], eos_token_ids: Sequence[int]) -> SamplerOutput:
    """Sample from row i of (len(rows), vocab_size) logits by rows[i]. Computes in float32.

    The logits of a CPU are changed during the call.
    """
    vocab_size = logits.shape[1]
    rules, edits = edits_of(rows, eos_token_ids, vocab_size)
    is_ruled = any(edits)
    random = [index for index, row in enumerate(rows) if not row.params.greedy]
    kernels = sampling_kernels_for(logits.device)
    best_logits: tuple[Tensor, ...]
    if not random and not is_ruled:
        token_ids, best_logit = _best(logits)
        best_logits = (best_logit,)
    elif kernels is not None:
        floats = logits.float().contiguous()
        masks = [None if edit is None else edit.allowed for edit in edits]
        token_ids, *found = kernels.sample(_fields(floats, rows, rules, edits), masks, vocab_size)
        best_logits = tuple(found)
    else:
        token_ids, best_logit = _best(logits)
        best_logits = (best_logit,)
        adjusted = logits
        if is_ruled:
            adjusted = apply_edits(logits, rules, edits)
            token_ids, best_logit = _best(adjusted)
            best_logits = (*best_logits, best_logit)
        if random:
            index = to_device(random, torch.int64, logits.device)
            draws = [uniform(rows[row].seed, rows[row].position) for row in random]
            token_ids[index] = _draw(adjusted[index].float(), [rules[row] for row in random], draws)
    logprobs, with_logprobs = None, [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    if with_logprobs:
        num_top = [rows[row].params.logprobs or 0 for row in with_logprobs]
        index = to_device(with_logprobs, torch.int64, logits.device)
        logprobs = token_logprobs(logits, token_ids[index], num_top, index)
    return SamplerOutput(token_ids, to_host(token_ids), tuple(map(to_host, best_logits)), logprobs, with_logprobs)


def edits_of(
    rows: Sequence[SamplingRow], eos_token_ids: Sequence[int], vocab_size: int
) -> tuple[list[TokenRules], list[Edits | None]]:
    """Return the rules of each row's request, and what they change in the row."""
    rules = [TokenRules.for_row(row, eos_token_ids, vocab_size) for row in rows]
    return rules, [rule.edits(row) for rule, row in zip(rules, rows, strict=True)]


def _fields(
    floats: Tensor, rows: Sequence[SamplingRow], rules: Sequence[TokenRules], edits: Sequence[Edits | None]
) -> list[tuple[float, ...]]:
    """Return the rows for `Kernels.sample`. Valid as long as the arguments, and until the next edits of a choice."""
    addresses = range(floats.data_ptr(), floats.data_ptr() + floats.nbytes, floats.nbytes // len(rows))
    draws = [0 if row.params.greedy else uniform(row.seed, row.position) for row in rows]
    return [
        (address, drawn, *(_NO_EDITS if edit is None else _places(edit)), *rule.limits)
        for address, drawn, edit, rule in zip(addresses, draws, edits, rules, strict=True)
    ]


_NO_EDITS: Final = (0,) * 18


def _places(edit: Edits) -> list[int]:
    """Return the addresses and the length of each list."""
    found: list[int] = []
    for ids, values in edit[1:]:
        address, count = ids.buffer_info() if ids else (0, 0)
        found += (address, values.buffer_info()[0] if values else 0, count)
    return found


def token_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: Sequence[int], index: Tensor | None = None
) -> LogprobRows:
    """For row i of (rows, vocab_size) logits, compute the logprob of token_ids[i] and the num_top[i] best.

    `index`: take the rows with these numbers instead.
    """
    num_best = min(max(num_top, default=0), logits.shape[1])
    if kernels := sampling_kernels_for(logits.device):
        rows = torch.arange(len(logits)) if index is None else index
        chosen, ranks, values, ids = kernels.rate(logits.float().contiguous(), rows, token_ids, num_best)
        return LogprobRows(chosen, values, ids, ranks, num_top)
    logits = logits if index is None else logits[index]
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None]).squeeze(1)
    best = logprobs.topk(num_best, dim=-1)
    ranks = (logprobs > chosen[:, None]).sum(dim=-1) + 1
    return LogprobRows(to_host(chosen), to_host(best.values), to_host(best.indices), to_host(ranks), num_top)


def apply_edits(logits: Tensor, rules: Sequence[TokenRules], edits: Sequence[Edits | None]) -> Tensor:
    """Return a copy of the logits in float32 with the edits of each row. The number of calls is fixed."""
    adjusted = logits.to(torch.float32, copy=True)
    device, vocab_size, flat = adjusted.device, adjusted.shape[1], adjusted.view(-1)
    masks = {row: edit.allowed for row, edit in enumerate(edits) if edit is not None and edit.allowed is not None}
    if masks:
        index = to_device(list(masks), torch.int64, device)
        packed = np.array([np.frombuffer(mask, np.uint8, -(-vocab_size // 8)) for mask in masks.values()])
        bit_of = 1 << torch.arange(8, dtype=torch.uint8, device=device)
        bits = to_device(torch.from_numpy(packed), torch.uint8, device)[:, :, None] & bit_of
        limits = bits.view(len(masks), -1)[:, :vocab_size].float().sub_(0.5).mul_(math.inf)
        adjusted[index] = adjusted[index].minimum(limits)  # twice as fast as `masked_fill`
    (prompt, _), (new, _), (lowered, penalties), (biased, biases), (forbidden, _), (stops, _) = [
        _on_device([(row, *edit[1:][part]) for row, edit in enumerate(edits) if edit is not None], vocab_size, device)
        for part in range(6)
    ]
    factors = to_device([rule.params.repetition_penalty for rule in rules], torch.float32, device)
    for at in (prompt, new):
        found, factor = flat[at], factors[at // vocab_size]
        flat[at] = torch.where(found > 0, found / factor, found * factor)
    flat[lowered] -= penalties
    flat[biased] += biases
    flat[forbidden] = FORBIDDEN
    if len(stops):
        kept = flat[stops]
        flat[stops] = FORBIDDEN
        flat[stops] = torch.where(adjusted.amax(dim=1)[stops // vocab_size] > FORBIDDEN, FORBIDDEN, kept)
    return adjusted


def _on_device(
    lists: Sequence[tuple[int, array[int], array[float]]], vocab_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the places of the rows' tokens in all logits, and their values."""
    places = [np.array(ids, np.int64) + row * vocab_size for row, ids, _ in lists]
    values = [np.array(values) for _, _, values in lists]
    return (
        to_device(torch.from_numpy(np.concatenate([np.empty(0, np.int64), *places])), torch.int64, device),
        to_device(torch.from_numpy(np.concatenate([np.empty(0, np.float32), *values])), torch.float32, device),
    )


def uniform(seed: int, position: int) -> int:
    """Return a random number for the token at `position` of a sequence, in units of 2^-53, below 1.

    Seeds count modulo 2**64.

    It has no state, so a resumed stream samples the same tokens.
    """
    counter = (seed & _MASK).to_bytes(8, "little") + position.to_bytes(8, "little")
    digest = blake2b(counter, digest_size=8, person=_PERSON).digest()
    return int.from_bytes(digest, "little") >> (64 - UNIFORM_BITS)


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


def _draw(logits: Tensor, rules: Sequence[TokenRules], draws: Sequence[int]) -> Tensor:
    """Draw a token from each row of (rows, vocab_size) float32 logits by a random number in units of 2^-53."""
    limits = [rule.limits for rule in rules]
    if logits.device.type == "cpu":
        return torch.tensor([draw(*each) for each in zip(logits.numpy(), limits, draws, strict=True)])
    from worker.kernels import triton_sampling

    return triton_sampling.draw(logits.contiguous(), limits, draws)
