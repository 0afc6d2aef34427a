"""Guesses of the next tokens of a sequence, looked up in its own: what followed the same tokens before.

    tokens   ... [ the same tokens, as late as possible ] 7 8 9 ...          [ the last tokens ]
                                                          ^ source: the draft is 7 8 9

Hit rates are updated with every sampled token, drafted or not.
Source: Saxena, "Prompt Lookup Decoding" (2023), https://github.com/apoorvumang/prompt-lookup-decoding
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

_MIN_MATCH: Final = 2  # one equal token predicts nothing
_MAX_MATCH: Final = 16
"""Equal tokens before a source: longer matches count as equal."""
_MAX_LOOKED_UP: Final = 1 << 16
"""A lookup compares this many tokens, the latest, so that a long context does not slow the steps."""
_FIRST_HIT_RATES: Final = (0.0, 0.0, 0.3, 0.5, 0.7, 0.9)
"""Hit rates before the first measurement, by the bit length of the match."""
_HIT_WEIGHT: Final = 0.15
"""The weight of a new token in the moving average of hits."""


class Drafter:
    """Looks up the tokens that may follow one sequence. `extend` it with each token of the sequence, in order."""

    __slots__ = ("_hit_rates", "_ids", "_match", "_num_ids", "_source")

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._ids = np.fromiter(token_ids, dtype=np.int32)
        self._num_ids = len(self._ids)
        self._source = 0
        """The position of the tokens that may follow. 0: none is found."""
        self._match = 0
        """Equal tokens before the source and before the end."""
        self._hit_rates = list(_FIRST_HIT_RATES)
        self._look_up()

    def __len__(self) -> int:
        return self._num_ids

    @property
    def has_source(self) -> bool:
        return self._source > 0

    def hit_rate(self, num_drafted: int) -> float:
        """Return how likely the next draft token is right, if the `num_drafted` before it are."""
        return self._hit_rates[min(self._match + num_drafted, _MAX_MATCH).bit_length()]

    def draft(self, num_tokens: int) -> list[int]:
        """Return the tokens that begin at the source. Past the end of the sequence, they repeat."""
        assert self._source
        period = self._num_ids - self._source
        drafted: list[int] = self._ids[self._source : self._source + min(num_tokens, period)].tolist()
        return [drafted[index % period] for index in range(num_tokens)]

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens, and update the hit rates with them."""
        for token_id in token_ids:
            if self._source:
                self._count_hit(is_hit=bool(self._ids[self._source] == token_id))
            if self._num_ids == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty(max(64, self._num_ids), np.int32)])
            self._ids[self._num_ids] = token_id
            self._num_ids += 1
        if not self._source:
            self._look_up()

    def _count_hit(self, *, is_hit: bool) -> None:
        length = self._match.bit_length()
        self._hit_rates[length] += _HIT_WEIGHT * (is_hit - self._hit_rates[length])
        self._source = self._source + 1 if is_hit else 0
        self._match = min(self._match + 1, _MAX_MATCH) if is_hit else 0

    def _look_up(self) -> None:
        """Find the latest earlier position before which most tokens equal the sequence's end."""
        first = max(0, self._num_ids - _MAX_LOOKED_UP)
        count, ids = self._num_ids - first, self._ids[first:]
        if count <= _MIN_MATCH:
            return
        equal = (ids[1 : count - 1] == ids[count - 1]) & (ids[: count - 2] == ids[count - 2])
        sources = equal.nonzero()[0] + _MIN_MATCH
        if not len(sources):
            return
        match = _MIN_MATCH
        while match < _MAX_MATCH and sources[-1] > match:
            longer = sources[sources > match]
            longer = longer[ids[longer - match - 1] == ids[count - match - 1]]
            if not len(longer):
                break
            sources, match = longer, match + 1
        self._source, self._match = first + int(sources[-1]), match
