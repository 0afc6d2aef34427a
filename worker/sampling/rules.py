"""What a request says about tokens, as arrays and tensors: made at its first draw, shared by its choices and steps.

A draw then costs at most a pass over the vocabulary, however long the lists are that the client has sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.device import to_device
from worker.engine.step import SamplingRow
from worker.wire import SamplingParams

Ids = NDArray[np.int64]


class TokenRules:
    """The parts that a request does not use are None."""

    __slots__ = ("bad_words", "biases", "forbidden", "prompt_ids", "stop_ids")

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], eos_token_ids: Sequence[int], like: Tensor
    ) -> None:
        """`like`: a row of logits."""
        vocab_size, device = len(like), like.device
        single = [word[0] for word in params.bad_words if len(word) == 1]
        longer = [word for word in params.bad_words if len(word) > 1]
        self.bad_words = BadWords(longer) if longer else None
        self.forbidden: Tensor | None = None
        """(vocab_size,) bool: what is never drawn."""
        if params.allowed_token_ids is not None or single:
            forbidden = np.zeros(vocab_size, dtype=np.bool_)
            if params.allowed_token_ids is not None:
                forbidden[:] = True
                forbidden[_distinct(params.allowed_token_ids, vocab_size)] = False
            forbidden[_distinct(single, vocab_size)] = True
            self.forbidden = to_device(torch.from_numpy(forbidden), torch.bool, device)
        self.biases: tuple[Tensor, Tensor] | None = None
        """Distinct tokens, int64, and what is added to their logits, float32."""
        if params.logit_bias:
            ids, biases = _sums(params.logit_bias, vocab_size)
            self.biases = (
                to_device(torch.from_numpy(ids), torch.int64, device),
                to_device(torch.from_numpy(biases), torch.float32, device),
            )
        self.stop_ids: Tensor | None = None
        """What may not be drawn before min_tokens."""
        if params.min_tokens > 0:
            stop_ids = _distinct((*eos_token_ids, *params.stop_token_ids), vocab_size)
            self.stop_ids = to_device(torch.from_numpy(stop_ids), torch.int64, device)
        self.prompt_ids: Tensor | None = None
        """Distinct tokens that the repetition penalty is about, beside those of the output."""
        if params.repetition_penalty != 1.0:
            ids = _distinct(prompt_ids, vocab_size)
            self.prompt_ids = to_device(torch.from_numpy(ids), torch.int64, device)


class BadWords:
    """Words of several tokens: the last of each may not follow the others."""

    __slots__ = ("_distances", "_heads", "_last_heads", "_lasts", "_longest", "_starts")

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        """The heads, all tokens but the last, lie end to end. E.g. (1, 2, 9), (5, 9), (2, 3, 8):

        heads      1 2 | 5 | 2 3        starts  0 2 3        lasts  9 9 8
        distances  2 1 | 1 | 2 1        from the end of the output
        """
        lengths = np.fromiter((len(word) - 1 for word in words), dtype=np.int64, count=len(words))
        ends = lengths.cumsum()
        self._starts = ends - lengths
        self._heads: Ids = np.fromiter(chain.from_iterable(word[:-1] for word in words), np.int64, count=int(ends[-1]))
        self._distances = np.repeat(ends, lengths) - np.arange(ends[-1])
        self._last_heads = self._heads[ends - 1]
        self._lasts = np.fromiter((word[-1] for word in words), dtype=np.int64, count=len(words))
        self._longest = int(lengths.max())

    def completions(self, output_ids: Sequence[int], vocab_size: int) -> Ids | None:
        """The last tokens of the words whose other tokens end the output; None: of none."""
        if not output_ids or not (self._last_heads == output_ids[-1]).any():
            return None
        tail = np.asarray(output_ids[-self._longest :], dtype=np.int64)
        at_distance = np.full(self._longest + 1, -1, dtype=np.int64)
        at_distance[1 : len(tail) + 1] = tail[::-1]
        matches = np.logical_and.reduceat(at_distance[self._distances] == self._heads, self._starts)
        return _inside(self._lasts[matches], vocab_size) if matches.any() else None


class Tally:
    """The distinct tokens of one choice's output, and how often each was drawn. Every token is counted once, however
    many draws follow it."""

    __slots__ = ("_counts", "_ids", "_num_counted", "_num_distinct", "_places", "_vocab_size")

    _MANY = 64
    """So many new tokens are counted as a whole."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._places: dict[int, int] = {}
        self._ids: Ids = np.empty(16, dtype=np.int64)
        self._counts = np.empty(16, dtype=np.float32)
        self._num_distinct = 0
        self._num_counted = 0

    def count(self, output_ids: Sequence[int]) -> None:
        """`output_ids` are those of the last call, and perhaps more."""
        new = output_ids[self._num_counted :]
        if len(new) >= self._MANY:
            self._count_all(output_ids)
        else:
            for token_id in new:
                if 0 <= token_id < self._vocab_size:
                    self._count_one(token_id)
        self._num_counted = len(output_ids)

    def seen(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The tokens, int64, and their counts, float32; to be used before the next call of `count`."""
        ids = torch.from_numpy(self._ids[: self._num_distinct])
        counts = torch.from_numpy(self._counts[: self._num_distinct])
        return to_device(ids, torch.int64, device), to_device(counts, torch.float32, device)

    def _count_one(self, token_id: int) -> None:
        place = self._places.get(token_id)
        if place is not None:
            self._counts[place] += 1
            return
        place = self._places[token_id] = self._num_distinct
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.empty_like(self._counts)))
        self._ids[place], self._counts[place] = token_id, 1
        self._num_distinct += 1

    def _count_all(self, output_ids: Sequence[int]) -> None:
        ids, counts = np.unique(_inside(_array(output_ids), self._vocab_size), return_counts=True)
        self._num_distinct = len(ids)
        self._places = dict(zip(ids.tolist(), range(len(ids)), strict=True))
        self._ids = np.concatenate((ids, np.empty(16, dtype=np.int64)))
        self._counts = np.concatenate((counts.astype(np.float32), np.empty(16, dtype=np.float32)))


def rules_of(draw: SamplingRow, row: Tensor, eos_token_ids: Sequence[int]) -> TokenRules:
    """Those of the draw's request, made with its first draw."""
    rules = draw.request_cache.value
    if not isinstance(rules, TokenRules):
        rules = draw.request_cache.value = TokenRules(draw.params, draw.prompt_ids, eos_token_ids, row)
    return rules


def tally_of(draw: SamplingRow, vocab_size: int) -> Tally:
    """That of the draw's choice, with the whole of its output counted."""
    tally = draw.choice_cache.value
    if not isinstance(tally, Tally):
        tally = draw.choice_cache.value = Tally(vocab_size)
    tally.count(draw.output_ids)
    return tally


def _array(token_ids: Sequence[int]) -> Ids:
    return np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))


def _inside(ids: Ids, vocab_size: int) -> Ids:
    return ids[(ids >= 0) & (ids < vocab_size)]


def _distinct(token_ids: Sequence[int], vocab_size: int) -> Ids:
    return np.unique(_inside(_array(token_ids), vocab_size))


def _sums(pairs: Sequence[tuple[int, float]], vocab_size: int) -> tuple[Ids, NDArray[np.float32]]:
    """Distinct ids, and the sum of what each is given."""
    flat: Iterable[float] = chain.from_iterable(pairs)
    both = np.fromiter(flat, dtype=np.float64, count=2 * len(pairs)).reshape(-1, 2)
    both = both[(both[:, 0] >= 0) & (both[:, 0] < vocab_size)]
    ids, places = np.unique(both[:, 0].astype(np.int64), return_inverse=True)
    return ids, np.bincount(places, weights=both[:, 1], minlength=len(ids)).astype(np.float32)
