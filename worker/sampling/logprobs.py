"""Log probabilities of the model's own distribution: before any penalty, temperature or truncation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from worker.device import to_host
from worker.engine.step import NonFiniteLogits
from worker.wire import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """The logprobs of some tokens, still tensors."""

    chosen: Tensor
    """(rows,)"""
    values: Tensor
    """(rows, most that any row asks for), best first"""
    ids: Tensor
    """The tokens of `values`."""
    num_top: Sequence[int]

    def to_host(self) -> LogprobRows:
        """Not to be read before the device is done with what is queued now."""
        return LogprobRows(to_host(self.chosen), to_host(self.values), to_host(self.ids), self.num_top)

    def rows(self) -> list[TokenLogprobs]:
        """Of tensors on the host. Raises NonFiniteLogits: one logit that is not a number makes all of its row NaN."""
        if broken := self.chosen.isnan().nonzero().flatten().tolist():
            raise NonFiniteLogits("the model's logits are not finite", broken)
        ids, values = self.ids.tolist(), self.values.tolist()
        return [
            TokenLogprobs(value, tuple(zip(ids[row][:count], values[row][:count], strict=True)))
            for row, (value, count) in enumerate(zip(self.chosen.tolist(), self.num_top, strict=True))
        ]


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> LogprobRows:
    """For row i of (rows, vocab_size) logits: the logprob of token_ids[i] and the num_top[i] best.

    Nothing in it waits for the device.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None]).squeeze(1)
    most = min(max(num_top, default=0), logits.shape[1])
    best = logprobs.topk(most, dim=-1)
    return LogprobRows(chosen, best.values, best.indices, num_top)
