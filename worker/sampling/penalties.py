"""Logits moved by what was said before: repetition, frequency and presence penalties, and logit bias."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from worker.step import Draw
from worker.transfer import to_device


def is_penalised(draw: Draw) -> bool:
    params = draw.params
    return bool(
        params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty or params.logit_bias
    )


def penalise(row: Tensor, draw: Draw) -> None:
    """Change a row (vocab_size,) in place.

    Repetition counts prompt and output (source: CTRL, arXiv 1909.05858, section 4.1); frequency and presence count the
    output alone, as OpenAI documents them.
    """
    params = draw.params
    if params.repetition_penalty != 1.0:
        seen = _unique((*draw.prompt_ids, *draw.output_ids), row)[0]
        logits = row[seen]
        penalty = params.repetition_penalty
        row[seen] = torch.where(logits > 0, logits / penalty, logits * penalty)
    if draw.output_ids and (params.frequency_penalty or params.presence_penalty):
        seen, counts = _unique(draw.output_ids, row)
        row[seen] -= params.frequency_penalty * counts + params.presence_penalty
    if inside := [(token_id, bias) for token_id, bias in params.logit_bias if 0 <= token_id < len(row)]:
        token_ids, biases = zip(*inside, strict=True)
        row.index_add_(0, to_device(token_ids, torch.int64, row.device), to_device(biases, torch.float32, row.device))


def _unique(token_ids: object, row: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct ids within the vocabulary, int64, and how often each occurs, float32."""
    ids, counts = np.unique(np.asarray(token_ids, dtype=np.int64), return_counts=True)
    inside = (ids >= 0) & (ids < len(row))
    seen, often = torch.from_numpy(ids[inside]), torch.from_numpy(counts[inside])
    return to_device(seen, torch.int64, row.device), to_device(often, torch.float32, row.device)
