"""The pieces of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of the last started call's arguments."""

    text: str


Piece = Content | Reasoning | CallStart | CallArguments


class TextParser(Protocol):
    def feed(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]:
        """What was held back. Nothing is fed afterwards."""


def ambiguous_len(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins, but does not complete, a marker."""
    longest = 0
    for marker in markers:
        for length in range(min(len(text), len(marker) - 1), longest, -1):
            if marker.startswith(text[-length:]):
                longest = length
                break
    return longest
