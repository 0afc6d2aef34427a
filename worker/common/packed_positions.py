"""Log probabilities of a prompt, in little memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from worker.wire import TokenLogprobs

_encode: Final = msgspec.msgpack.Encoder().encode
_decode_positions: Final = msgspec.msgpack.Decoder(list[TokenLogprobs | None]).decode
_POSITIONS_AT_ONCE: Final = 256


class PackedPositions(Sequence[TokenLogprobs | None]):
    """The positions of PromptLogprobs as msgpack: objects take ten times the memory."""

    __slots__ = ("_len", "_parts")

    def __init__(self, positions: Sequence[TokenLogprobs | None] = ()) -> None:
        self._parts: list[bytes] = []
        self._len = 0
        self.extend(positions)

    def extend(self, positions: Sequence[TokenLogprobs | None]) -> None:
        for start in range(0, len(positions), _POSITIONS_AT_ONCE):
            self._parts.append(_encode(positions[start : start + _POSITIONS_AT_ONCE]))
        self._len += len(positions)

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[TokenLogprobs | None]:
        for part in self._parts:
            yield from _decode_positions(part)

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]
