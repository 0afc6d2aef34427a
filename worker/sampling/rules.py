"""The rules of a request about single tokens: which are forbidden, penalised or biased.

The lists of a request become tensors once, which all its choices and steps share. Long lists do so before the request
is queued, others at its first sampling. Applying them costs at most one pass over the vocabulary.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from copy import copy
from itertools import chain
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.contracts.step import SamplingRow
from worker.kernels.device import to_device
from worker.wire import SamplingParams

Ids = NDArray[np.int64]
_FORBIDDEN: Final = float("-inf")
_PART: Final = 16_384
"""Listed ids that are read in one call, which holds the interpreter's lock."""


def has_rules(row: SamplingRow) -> bool:
    """Return whether `TokenRules.apply` would change the row's logits."""
    params = row.params
    return bool(
        row.allowed is not None
        or params.allowed_token_ids is not None
        or params.bad_words
        or row.num_output < params.min_tokens
        or params.repetition_penalty != 1.0
        or params.frequency_penalty
        or params.presence_penalty
        or params.logit_bias
    )


class TokenRules:
    """The rules of one request as tensors. Those that it does not use are None."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._last_ids: dict[tuple[int, ...], list[int]] = defaultdict(list)
        """By the head of a bad word of several tokens: the tokens that may not follow it."""
        for word in params.bad_words:
            if len(word) > 1:
                self._last_ids[word[:-1]].append(word[-1])
        self._head_lengths = {len(head) for head in self._last_ids}
        self._bias = _bias(params, vocab_size, device)
        self._stop_ids: Tensor | None = None
        """Tokens that are forbidden before min_tokens."""
        if params.min_tokens > 0:
            self._stop_ids = _ids_to_device(_distinct((*eos_token_ids, *params.stop_token_ids), vocab_size), device)
        self._prompt_ids: Tensor | None = None
        """Distinct tokens for the repetition penalty."""
        if params.repetition_penalty != 1.0:
            self._prompt_ids = _ids_to_device(_distinct(prompt_ids, vocab_size), device)

    @classmethod
    def for_row(cls, row: SamplingRow, eos_token_ids: Sequence[int], logits: Tensor) -> TokenRules:
        """Return the rules of the row's request. Makes them at the first row, if not before."""
        rules = row.request_cache.value
        if not isinstance(rules, TokenRules) or rules._vocab_size != len(logits):
            rules = cls(row.params, row.prompt_ids, eos_token_ids, len(logits), logits.device)
            row.request_cache.value = rules
        elif rules._device != logits.device:
            rules = row.request_cache.value = rules._on(logits.device)
        return rules

    def _on(self, device: torch.device) -> TokenRules:
        """Return the same rules on another device."""
        moved = copy(self)
        moved._device = device
        moved._bias = None if self._bias is None else to_device(self._bias, torch.float32, device)
        moved._stop_ids = None if self._stop_ids is None else to_device(self._stop_ids, torch.int64, device)
        moved._prompt_ids = None if self._prompt_ids is None else to_device(self._prompt_ids, torch.int64, device)
        return moved

    def apply(self, logits: Tensor, row: SamplingRow) -> None:
        """Change the logits (vocab_size,) of one row in place. A forbidden token gets -inf.

        min_tokens does not apply if it leaves no other token.
        """
        if row.allowed is not None:
            allowed = to_device(_unpack_bits(row.allowed, len(logits)), torch.bool, logits.device)
            logits.masked_fill_(~allowed, _FORBIDDEN)
        heads = (row.last_output_ids(length) for length in self._head_lengths)
        if completions := [token_id for head in heads for token_id in self._last_ids.get(head, ())]:
            logits[_ids_to_device(_distinct(completions, len(logits)), logits.device)] = _FORBIDDEN
        self._penalise(logits, row)
        if self._bias is not None:
            logits += self._bias
        if self._stop_ids is not None and row.num_output < row.params.min_tokens:
            kept = logits[self._stop_ids]
            logits[self._stop_ids] = _FORBIDDEN
            logits[self._stop_ids] = torch.where(logits.isfinite().any(), _FORBIDDEN, kept)

    def _penalise(self, logits: Tensor, row: SamplingRow) -> None:
        """Apply penalties: repetition to prompt and output, frequency and presence to the output, as OpenAI does.

        Source: CTRL, arXiv 1909.05858, section 4.1, for the repetition penalty.
        """
        params = row.params
        if params.repetition_penalty == 1.0 and not params.frequency_penalty and not params.presence_penalty:
            return
        seen, counts = OutputCounts.for_row(row, len(logits)).tensors(row.draft_ids, logits.device)
        if self._prompt_ids is not None:
            # A token in both is penalised once: both assignments write the same value.
            prompt_logits = _repetition(logits[self._prompt_ids], params.repetition_penalty)
            output_logits = _repetition(logits[seen], params.repetition_penalty)
            logits[self._prompt_ids] = prompt_logits
            logits[seen] = output_logits
        if params.frequency_penalty or params.presence_penalty:
            logits[seen] -= params.frequency_penalty * counts + params.presence_penalty


def _bias(params: SamplingParams, vocab_size: int, device: torch.device) -> Tensor | None:
    """Return (vocab_size,) float32: logit_bias, and -inf for tokens that are never allowed. None: neither is set."""
    single = [word[0] for word in params.bad_words if len(word) == 1]
    if params.allowed_token_ids is None and not single and not params.logit_bias:
        return None
    bias = np.zeros(vocab_size)
    if params.allowed_token_ids is not None:
        bias[:] = _FORBIDDEN
        bias[_distinct(params.allowed_token_ids, vocab_size)] = 0.0
    bias[_distinct(single, vocab_size)] = _FORBIDDEN
    pairs: Iterable[float] = chain.from_iterable(params.logit_bias)
    ids, values = np.fromiter(pairs, dtype=np.float64, count=2 * len(params.logit_bias)).reshape(-1, 2).T
    inside = (ids >= 0) & (ids < vocab_size)
    np.add.at(bias, ids[inside].astype(np.int64), values[inside])
    return to_device(torch.from_numpy(bias), torch.float32, device)


class OutputCounts:
    """The distinct tokens of one choice's output, and their counts, updated with each new token."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._positions: dict[int, int] = {}
        self._ids, self._counts = array("q"), array("f")
        self._num_counted = 0

    @classmethod
    def for_row(cls, row: SamplingRow, vocab_size: int) -> OutputCounts:
        """Return the counts of the row's choice, with all of its output and no draft."""
        counts = row.choice_cache.value
        if not isinstance(counts, OutputCounts):
            counts = row.choice_cache.value = cls(vocab_size)
        counts.update(row.output_ids)
        return counts

    def update(self, output_ids: Sequence[int]) -> None:
        """Count the tokens that the output has gained since the last call."""
        for token_id in output_ids[self._num_counted :]:
            if 0 <= token_id < self._vocab_size:
                self._count_one(token_id)
        self._num_counted = len(output_ids)

    def tensors(self, draft_ids: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the tokens of output and draft, int64, and their counts, float32."""
        ids, counts = np.array(self._ids), np.array(self._counts)
        new: Counter[int] = Counter()
        for token_id in draft_ids:
            if (position := self._positions.get(token_id)) is not None:
                counts[position] += 1
            elif 0 <= token_id < self._vocab_size:
                new[token_id] += 1
        if new:
            ids = np.concatenate([ids, np.fromiter(new, np.int64)])
            counts = np.concatenate([counts, np.fromiter(new.values(), np.float32)])
        return _ids_to_device(ids, device), to_device(torch.from_numpy(counts), torch.float32, device)

    def _count_one(self, token_id: int) -> None:
        position = self._positions.setdefault(token_id, len(self._positions))
        if position == len(self._ids):
            self._ids.append(token_id)
            self._counts.append(0)
        self._counts[position] += 1


def _repetition(logits: Tensor, penalty: float) -> Tensor:
    return torch.where(logits > 0, logits / penalty, logits * penalty)


def _unpack_bits(words: object, vocab_size: int) -> Tensor:
    """int32 words, lowest bit first -> (vocab_size,) bool. Tokens beyond the mask are False."""
    array = np.ascontiguousarray(np.asarray(words).reshape(-1)).view(np.uint8)
    bits = np.unpackbits(array, bitorder="little")[:vocab_size].view(np.bool_)
    allowed = np.zeros(vocab_size, dtype=np.bool_)
    allowed[: len(bits)] = bits
    return torch.from_numpy(allowed)


def _ids_to_device(ids: Ids, device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(ids), torch.int64, device)


def _distinct(token_ids: Sequence[int], vocab_size: int) -> Ids:
    """Return the distinct tokens of the vocabulary, ascending."""
    if len(token_ids) <= _PART:
        ids = np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))
        return np.unique(ids[(ids >= 0) & (ids < vocab_size)])
    is_listed = np.zeros(vocab_size, dtype=np.bool_)
    for start in range(0, len(token_ids), _PART):
        is_listed[_distinct(token_ids[start : start + _PART], vocab_size)] = True
    return is_listed.nonzero()[0]
