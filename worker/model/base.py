"""The interfaces of the model folder: checkpoint, decoder and family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor

from worker.attention.base import Attention, ForwardBatch
from worker.files.model_files import ModelFiles
from worker.model.config import LoadOptions, ModelConfig
from worker.model.weight_file import Weights

Progress = Callable[[int, int], None]
"""Called with (layers loaded, layers in all) while a model loads."""


@dataclass(frozen=True, slots=True)
class QuantisedTensor:
    """The stored blocks of a quantised matrix: `data` (rows, bytes of a row) uint8, rows in Hugging Face's order."""

    kind: str
    data: np.ndarray
    shape: tuple[int, int]


class Checkpoint(ABC):
    """Weights by their Hugging Face names, whatever the file format. Tensors are read when asked for."""

    path: Path
    """The GGUF file, or the folder of a Hugging Face checkpoint."""
    name: str
    revision: str
    """A commit, or the digest of `files`: equal files have equal revisions on every machine."""
    files: ModelFiles
    """The identity of the model: every byte of its files. Stored KV is kept under its digest."""
    model_type: str

    @abstractmethod
    def config(self, family: ModelFamily) -> ModelConfig:
        """Read the shape of the decoder. Raise ModelError."""

    @abstractmethod
    def has(self, name: str) -> bool: ...

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """Read a tensor, dequantised. Raise CheckpointError when there is none of this name."""

    def quantised(self, name: str) -> QuantisedTensor | None:
        """Read the stored blocks of a matrix. None: it is not quantised."""
        return None

    def rope_factors(self) -> Tensor | None:
        """Return (head_dim / 2) divisors of the rotary frequencies if the file has them (GGUF of Llama 3)."""
        return None


class Decoder(Protocol):
    """A causal language model over a paged KV cache: tensors in, tensors out. It never sees a request."""

    config: ModelConfig
    is_recordable: bool
    """A CUDA graph can record it: it does no work on the host."""

    def forward(self, batch: ForwardBatch, attention: Attention) -> Tensor:
        """Return the normalised hidden state after the last layer, (num_tokens, hidden_size)."""

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, hidden_size) -> (rows, vocab_size), in the model's dtype"""


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Models that share a decoder, with the traits that their files leave out."""

    decoder: Callable[[Checkpoint, ModelConfig, LoadOptions, Weights, Progress], Decoder]
    """Loads the weights. Raises ModelError."""
    qk_norm: bool = False
    """Queries and keys are normed per head."""
    window: int | None = None
    """The sliding window where config.json has none. None: only `layer_types` gives a layer one."""
    optional_window: bool = False
    """The sliding window needs `use_sliding_window`, and begins at layer `max_window_layers`."""
