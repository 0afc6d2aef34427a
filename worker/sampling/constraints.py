"""What may not be drawn: grammar, allowed ids, bad words, and stop tokens before min_tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from worker.device import to_device
from worker.engine.step import SamplingRow
from worker.sampling.rules import TokenRules

_FORBIDDEN = float("-inf")


def is_constrained(draw: SamplingRow) -> bool:
    params = draw.params
    return bool(
        draw.allowed is not None
        or params.allowed_token_ids is not None
        or params.bad_words
        or len(draw.output_ids) < params.min_tokens
    )


def constrain(row: Tensor, draw: SamplingRow, rules: TokenRules) -> None:
    """Set forbidden entries of a row (vocab_size,) to -inf, in place.

    min_tokens yields when the grammar, or the allowed ids, leave nothing but stop tokens.
    """
    if draw.allowed is not None:
        row.masked_fill_(~to_device(_unpack(draw.allowed, len(row)), torch.bool, row.device), _FORBIDDEN)
    if rules.forbidden is not None:
        row.masked_fill_(rules.forbidden, _FORBIDDEN)
    if rules.bad_words is not None:
        completions = rules.bad_words.completions(draw.output_ids, len(row))
        if completions is not None:
            row[to_device(torch.from_numpy(completions), torch.int64, row.device)] = _FORBIDDEN
    if rules.stop_ids is not None and len(draw.output_ids) < draw.params.min_tokens:
        stops = rules.stop_ids
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
