"""Logits moved by what was said before: repetition, frequency and presence penalties, and logit bias."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.engine.step import SamplingRow
from worker.sampling.rules import TokenRules, tally_of


def is_penalised(draw: SamplingRow) -> bool:
    params = draw.params
    return bool(
        params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty or params.logit_bias
    )


def penalise(row: Tensor, draw: SamplingRow, rules: TokenRules) -> None:
    """Change a row (vocab_size,) in place.

    Repetition counts prompt and output (source: CTRL, arXiv 1909.05858, section 4.1); frequency and presence count the
    output alone, as OpenAI documents them.
    """
    params = draw.params
    if params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty:
        seen, counts = tally_of(draw, len(row)).seen(row.device)
        if rules.prompt_ids is not None:
            # A token of both is penalised once: each gets the same value twice.
            of_prompt = _repeated(row[rules.prompt_ids], params.repetition_penalty)
            of_output = _repeated(row[seen], params.repetition_penalty)
            row[rules.prompt_ids] = of_prompt
            row[seen] = of_output
        if params.frequency_penalty or params.presence_penalty:
            row[seen] -= params.frequency_penalty * counts + params.presence_penalty
    if rules.biases is not None:
        row.index_add_(0, *rules.biases)


def _repeated(logits: Tensor, penalty: float) -> Tensor:
    return torch.where(logits > 0, logits / penalty, logits * penalty)
