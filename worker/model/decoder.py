"""What the runner needs of a model: tensors in, tensors out. A model never sees a request."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from worker.attention.base import Attention, ForwardBatch
from worker.model.config import ModelConfig


class Decoder(Protocol):
    """A causal language model over a paged KV cache."""

    @property
    def config(self) -> ModelConfig: ...

    def forward(self, batch: ForwardBatch, attention: Attention) -> Tensor:
        """The normalised hidden state after the last layer, (num_tokens, hidden_size)."""

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, hidden_size) -> (rows, vocab_size), in the model's dtype."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one forward and its logits read."""
