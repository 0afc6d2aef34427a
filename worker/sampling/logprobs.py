"""Log probabilities of the model's own distribution: before any penalty, temperature or truncation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.wire import TokenLogprobs


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """For row i of (rows, vocab_size) logits: the logprob of token_ids[i] and the num_top[i] best, best first."""
    if not token_ids:
        return []
    logprobs = logits.float().log_softmax(dim=-1)
    index = torch.tensor(token_ids, device=logits.device)[:, None]
    chosen = logprobs.gather(1, index).squeeze(1).tolist()
    most = min(max(num_top), logits.shape[1])
    if most == 0:
        return [TokenLogprobs(value) for value in chosen]
    values, ids = (best.tolist() for best in logprobs.topk(most, dim=-1))
    return [
        TokenLogprobs(value, tuple(zip(ids[row][:count], values[row][:count], strict=True)))
        for row, (value, count) in enumerate(zip(chosen, num_top, strict=True))
    ]
