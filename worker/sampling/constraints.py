"""What may not be drawn: grammar, allowed ids, bad words, and stop tokens before min_tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker.step import Draw
from worker.transfer import to_device

_FORBIDDEN = float("-inf")


def is_constrained(draw: Draw) -> bool:
    params = draw.params
    return bool(
        draw.allowed is not None
        or params.allowed_token_ids is not None
        or params.bad_words
        or len(draw.output_ids) < params.min_tokens
    )


def constrain(row: Tensor, draw: Draw, eos_token_ids: Sequence[int]) -> None:
    """Set forbidden entries of a row (vocab_size,) to -inf, in place.

    min_tokens yields when the grammar, or the allowed ids, leave nothing but stop tokens.
    """
    params = draw.params
    if draw.allowed is not None:
        row.masked_fill_(~to_device(_unpack(draw.allowed, len(row)), torch.bool, row.device), _FORBIDDEN)
    if params.allowed_token_ids is not None:
        hidden = torch.ones_like(row, dtype=torch.bool)
        hidden[_in_vocabulary(params.allowed_token_ids, row)] = False
        row.masked_fill_(hidden, _FORBIDDEN)
    if params.bad_words:
        row[_in_vocabulary(_completions(params.bad_words, draw.output_ids), row)] = _FORBIDDEN
    if len(draw.output_ids) < params.min_tokens:
        stops = _in_vocabulary((*eos_token_ids, *params.stop_token_ids), row)
        kept = row[stops]
        row[stops] = _FORBIDDEN
        row[stops] = torch.where(row.isfinite().any(), _FORBIDDEN, kept)


def _unpack(words: object, vocab_size: int) -> Tensor:
    """int32 words, lowest bit first -> (vocab_size,) bool; tokens beyond the mask are forbidden."""
    array = np.ascontiguousarray(np.asarray(words).reshape(-1)).view(np.uint8)
    bits = np.unpackbits(array, bitorder="little")[:vocab_size].view(np.bool_)
    if len(bits) < vocab_size:
        bits = np.concatenate((bits, np.zeros(vocab_size - len(bits), dtype=np.bool_)))
    return torch.from_numpy(bits)


def _completions(bad_words: Sequence[Sequence[int]], output_ids: Sequence[int]) -> list[int]:
    """The last token of every bad word whose other tokens end the output."""
    longest = max(len(word) for word in bad_words)
    tail = tuple(output_ids[max(0, len(output_ids) - longest) :])
    return [word[-1] for word in bad_words if word and tail[len(tail) - len(word) + 1 :] == tuple(word[:-1])]


def _in_vocabulary(token_ids: Sequence[int], row: Tensor) -> Tensor:
    valid = sorted({token_id for token_id in token_ids if 0 <= token_id < len(row)})
    return to_device(valid, torch.int64, row.device)
