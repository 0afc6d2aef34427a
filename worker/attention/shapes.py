"""The few shapes that decodes are padded to on a GPU: for each, Triton compiles a kernel and a graph is recorded.

xformers' kernel takes the number of rows and the width of the block table as constants. A shape of its own for every
step would be compiled within the step, for half a second or more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

ROWS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CONTEXTS: Final = (2048, 16384, 131072)
"""Tokens: a kernel divides its work by the length that it is made for, so one for all would be slow for short ones."""


def padded(size: int, sizes: Sequence[int]) -> int:
    """The smallest of the ascending `sizes` that holds `size`; beyond them, a multiple of the last."""
    if size <= sizes[-1]:
        return sizes[bisect_left(sizes, size)]
    return -(-size // sizes[-1]) * sizes[-1]
