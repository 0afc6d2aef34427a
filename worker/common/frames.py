"""Reads the frames of a worker's stream as their bytes arrive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgpack
import msgspec

from worker.wire import FRAMES, MAX_FRAME_BYTES, Frame, TokenLogprobs, Tokens, WireError, pack

_BUFFER_BYTES: Final = 4096  # an unpacker that had a longer frame keeps a larger buffer
_decode_positions: Final = msgspec.msgpack.Decoder(list[TokenLogprobs | None]).decode


class PackedPositions:
    """The positions of all PromptLogprobs of a prompt as msgpack: objects take ten times the memory."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def add(self, positions: Sequence[TokenLogprobs | None]) -> None:
        """Add the positions of a frame. Those that begin with None, for the first token, replace what is there."""
        if positions and positions[0] is None:
            self._parts = []
        self._parts.append(pack(positions))

    def __iter__(self) -> Iterator[TokenLogprobs | None]:
        for part in self._parts:
            yield from _decode_positions(part)


class FrameReader:
    """Cuts a byte stream into frames."""

    __slots__ = ("_idle", "_num_fed", "_unpacker")

    def __init__(self, idle: list[msgpack.Unpacker] | None = None) -> None:
        """`idle` keeps one unpacker for all readers of a thread: a new one costs as much as twenty frames."""
        self._idle = [] if idle is None else idle
        self._unpacker: msgpack.Unpacker | None = None
        """Only while a frame is incomplete: it takes 41 KB, and a thousand streams may be open."""
        self._num_fed = 0

    def feed(self, data: bytes) -> list[Frame]:
        """Take the next bytes, and return the frames that are complete. Raises WireError."""
        try:
            frames: list[Frame] = []
            unpacker, end = self._unpacker, 0
            if unpacker is None:
                unpacker = self._idle.pop() if self._idle else _new_unpacker()
                end = self._num_fed = unpacker.tell()
            unpacker.feed(data)
            self._num_fed += len(data)
            for message in unpacker:
                if (frame := _frame(message)) is not None:
                    frames.append(frame)
                end = unpacker.tell()
        except WireError:
            raise
        except (ValueError, TypeError, LookupError, msgpack.UnpackException, RecursionError) as error:
            raise WireError(f"not a frame: {error}") from error
        if end != self._num_fed:
            self._unpacker = unpacker
            return frames
        if self._unpacker is None and not self._idle and len(data) <= _BUFFER_BYTES:  # else its buffer has grown
            self._idle.append(unpacker)
        self._unpacker = None
        return frames


def _new_unpacker() -> msgpack.Unpacker:
    return msgpack.Unpacker(max_buffer_size=MAX_FRAME_BYTES, read_size=_BUFFER_BYTES, use_list=False)


def _frame(message: Any) -> Frame | None:
    """Return the frame; None for one of a newer version. Raises WireError, and what a conversion raises."""
    if type(message) is tuple and len(message) == 4 and message[0] == 1 and message[3] is None:  # the most frequent
        _, choice, token_ids, _ = message
        if type(choice) is int and type(token_ids) is tuple:
            return Tokens(choice, token_ids)
    match message:
        case (int(tag), *_) if 0 <= tag < len(FRAMES):
            return msgspec.convert(message, FRAMES[tag])
        case (int(tag), *_) if tag > 0:
            return None
    raise WireError(f"not a frame: {message!r:.80}")
