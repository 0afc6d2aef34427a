"""The rules of a request about single tokens: which are forbidden, penalised or biased.

A request's lists are laid out once, before it is queued if they are long. A choice's grow by a token a step. What a row
of logits needs is `Edits`: only the tokens that change, and a mask of bits.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from worker.contracts.step import SamplingRow
from worker.kernels.cpu import UNIFORM_BITS, Limits
from worker.wire import SamplingParams

Ids = NDArray[np.int64]
Listed: TypeAlias = "tuple[array[int], array[float]]"
"""Tokens, and a value for each or none."""
FORBIDDEN: Final = float("-inf")
_MIN_TEMPERATURE: Final = 1e-5
"""A lower temperature is greedy in effect, and dividing by it would overflow."""
_PART: Final = 16_384
"""Listed ids that are read in one call, which holds the interpreter's lock."""
_NO_IDS: Final = array("i")
_NO_VALUES: Final = array("f")


class Edits(NamedTuple):
    """Changes of a row of logits, in this order. A token is at most once in each list."""

    allowed: bytes | None
    """A bit for each token, at least for all of the vocabulary in words of 64; those with 0 are forbidden."""
    in_prompt: Listed
    """Repeated tokens. Source of the penalty: CTRL, arXiv 1909.05858, section 4.1."""
    only_in_output: Listed
    """The other repeated tokens."""
    lowered: Listed
    """Tokens of the output, and their frequency and presence penalties, as OpenAI defines them."""
    biased: Listed
    forbidden: Listed
    stops: Listed
    """Forbidden, unless that leaves no other token."""


class TokenRules:
    """The rules and limits of one request."""

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], eos_token_ids: Sequence[int], vocab_size: int
    ) -> None:
        self.vocab_size = vocab_size
        self.params = params
        self.limits = _limits(params)
        self._last_ids: dict[tuple[int, ...], list[int]] = defaultdict(list)
        """By the head of a bad word of several tokens: the tokens that may not follow it."""
        for word in params.bad_words:
            if len(word) > 1:
                self._last_ids[word[:-1]].append(word[-1])
        self._head_lengths = {len(head) for head in self._last_ids}
        self._allowed = None
        if params.allowed_token_ids is not None:
            is_allowed = np.zeros(-(-vocab_size // 64) * 64, dtype=np.bool_)
            is_allowed[_distinct(params.allowed_token_ids, vocab_size)] = True
            self._allowed = np.packbits(is_allowed, bitorder="little").tobytes()
        self._biased = _biases(params, vocab_size)
        self._stops = _NO_IDS
        if params.min_tokens > 0:
            self._stops = _as_array(_distinct((*eos_token_ids, *params.stop_token_ids), vocab_size))
        self._repeats = params.repetition_penalty != 1.0
        self.prompt_ids = _as_array(_distinct(prompt_ids, vocab_size)) if self._repeats else _NO_IDS
        """Ascending."""
        self._counts = self._repeats or bool(params.frequency_penalty or params.presence_penalty)
        self._changes = bool(self._counts or self._allowed is not None or self._biased[0] or self._last_ids)

    @classmethod
    def for_row(cls, row: SamplingRow, eos_token_ids: Sequence[int], vocab_size: int) -> TokenRules:
        """Return the rules of the row's request. Makes them at the first row, if not before."""
        rules = row.request_cache.value
        if not isinstance(rules, TokenRules) or rules.vocab_size != vocab_size:
            rules = row.request_cache.value = cls(row.params, row.prompt_ids, eos_token_ids, vocab_size)
        return rules

    def edits(self, row: SamplingRow) -> Edits | None:
        """Return what changes in a row of the request. It is valid until the next call for the same choice."""
        needs_more = row.num_output < self.params.min_tokens
        if not self._changes and row.allowed is None and not needs_more:
            return None
        allowed = self._allowed
        if row.allowed is not None:
            allowed = np.asarray(row.allowed).tobytes().ljust(-(-self.vocab_size // 64) * 8, b"\0")
            if self._allowed is not None:
                mask = np.frombuffer(self._allowed, np.uint32)
                allowed = (mask & np.frombuffer(allowed, np.uint32, len(mask))).tobytes()
        new_ids, ids, penalties = _NO_IDS, _NO_IDS, _NO_VALUES
        if self._counts:
            output = OutputTokens.for_row(row, self)
            new_ids, ids, penalties = output.with_drafts(row.draft_ids, self) if row.draft_ids else output.lists()
        forbidden = _NO_IDS
        if self._last_ids:
            heads = (row.last_output_ids(length) for length in self._head_lengths)
            last_ids = {token_id for head in heads for token_id in self._last_ids.get(head, ())}
            forbidden = array("i", [token_id for token_id in last_ids if 0 <= token_id < self.vocab_size])
        return Edits(
            allowed,
            (self.prompt_ids, _NO_VALUES),
            (new_ids, _NO_VALUES),
            (ids, penalties),
            self._biased,
            (forbidden, _NO_VALUES),
            (self._stops if needs_more else _NO_IDS, _NO_VALUES),
        )

    def penalty_of(self, count: int) -> float:
        """Return what a token that is `count` times in the output loses."""
        return self.params.frequency_penalty * count + self.params.presence_penalty

    def is_penalised_new(self, token_id: int) -> bool:
        """Return whether a token that is new in the output gets the repetition penalty for it."""
        at = bisect_left(self.prompt_ids, token_id)
        return self._repeats and (at == len(self.prompt_ids) or self.prompt_ids[at] != token_id)


class OutputTokens:
    """The distinct tokens of one choice's output, with their penalties, updated with each new token."""

    def __init__(self) -> None:
        self._positions: dict[int, int] = {}
        self._ids, self._counts = array("i"), array("i")
        self._penalties = array("f")
        self._new_ids = array("i")
        """Those with the repetition penalty that are not in the prompt."""
        self._num_counted = 0

    @classmethod
    def for_row(cls, row: SamplingRow, rules: TokenRules) -> OutputTokens:
        """Return the tokens of the row's choice, with all of its output and no draft."""
        found = row.choice_cache.value
        if not isinstance(found, OutputTokens):
            found = row.choice_cache.value = cls()
        for token_id in row.output_ids[found._num_counted :]:
            if 0 <= token_id < rules.vocab_size:
                found._count(token_id, rules)
        found._num_counted = len(row.output_ids)
        return found

    def lists(self) -> tuple[array[int], array[int], array[float]]:
        """Return the new tokens, and all with their penalties."""
        return self._new_ids, self._ids, self._penalties

    def with_drafts(self, draft_ids: Sequence[int], rules: TokenRules) -> tuple[array[int], array[int], array[float]]:
        """Return copies of the lists, as if the draft followed the output."""
        new_ids, ids, penalties = self._new_ids[:], self._ids[:], self._penalties[:]
        for token_id, count in Counter(draft_ids).items():
            if (position := self._positions.get(token_id)) is not None:
                penalties[position] = rules.penalty_of(self._counts[position] + count)
            elif 0 <= token_id < rules.vocab_size:
                ids.append(token_id)
                penalties.append(rules.penalty_of(count))
                if rules.is_penalised_new(token_id):
                    new_ids.append(token_id)
        return new_ids, ids, penalties

    def _count(self, token_id: int, rules: TokenRules) -> None:
        position = self._positions.setdefault(token_id, len(self._ids))
        if position == len(self._ids):
            self._ids.append(token_id)
            self._counts.append(0)
            self._penalties.append(0.0)
            if rules.is_penalised_new(token_id):
                self._new_ids.append(token_id)
        self._counts[position] += 1
        self._penalties[position] = rules.penalty_of(self._counts[position])


def _limits(params: SamplingParams) -> Limits:
    temperature = max(params.temperature, _MIN_TEMPERATURE)
    share = 1 << UNIFORM_BITS
    return Limits(
        -math.log(params.min_p) * temperature if params.min_p > 0 else math.inf,
        params.top_k,
        int(params.top_p * share),
        int(params.typical_p * share),
        params.repetition_penalty,
        0.0 if params.greedy else math.log2(math.e) / temperature,
    )


def _biases(params: SamplingParams, vocab_size: int) -> Listed:
    """Return the tokens of logit_bias and of bad words of one token, and what is added to their logits."""
    pairs: Iterable[float] = chain.from_iterable(params.logit_bias)
    listed, values = np.fromiter(pairs, dtype=np.float64, count=2 * len(params.logit_bias)).reshape(-1, 2).T
    single = [word[0] for word in params.bad_words if len(word) == 1]
    listed = np.concatenate([listed, np.array(single, dtype=np.float64)])
    values = np.concatenate([values, np.full(len(single), FORBIDDEN)])
    inside = (listed >= 0) & (listed < vocab_size)
    ids, places = np.unique(listed[inside].astype(np.int64), return_inverse=True)
    biases = np.zeros(len(ids))
    np.add.at(biases, places, values[inside])
    return _as_array(ids), array("f", biases.astype(np.float32).tobytes())


def _as_array(ids: Ids) -> array[int]:
    return array("i", ids.astype(np.int32).tobytes())


def _distinct(token_ids: Sequence[int], vocab_size: int) -> Ids:
    """Return the distinct tokens of the vocabulary, ascending."""
    if len(token_ids) <= _PART:
        ids = np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))
        return np.unique(ids[(ids >= 0) & (ids < vocab_size)])
    is_listed = np.zeros(vocab_size, dtype=np.bool_)
    for start in range(0, len(token_ids), _PART):
        is_listed[_distinct(token_ids[start : start + _PART], vocab_size)] = True
    return is_listed.nonzero()[0]
