"""Why no token can be drawn.

SamplingError (RuntimeError)
  +-- NoTokenLeft         every token is forbidden by the request's own limits
  +-- NonFiniteLogits     the model's output is not a number
"""

from __future__ import annotations

from collections.abc import Sequence


class SamplingError(RuntimeError):
    """`rows` are the rows of the logits that are to blame."""

    def __init__(self, message: str, rows: Sequence[int]) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


class NoTokenLeft(SamplingError):
    pass


class NonFiniteLogits(SamplingError):
    pass
