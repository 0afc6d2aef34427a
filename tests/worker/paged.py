"""A loaded model over a paged cache, without a scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cache.types import BlockId
from worker.attention.base import Attention, AttentionShape
from worker.attention.kv_cache import KVCache
from worker.attention.torch_paged import TorchPagedAttention
from worker.contracts.step import SequenceStep
from worker.model.load import LoadedModel
from worker.runner.model_runner import attention_order, build_batch


class PagedSequence:
    """A sequence of known tokens over its own blocks; `num_computed` of them are in the pool."""

    def __init__(self, token_ids: Sequence[int], block_table: Sequence[int], block_size: int) -> None:
        assert len(block_table) * block_size >= len(token_ids)
        self.token_ids = list(token_ids)
        self.block_table = [BlockId(block) for block in block_table]
        self.num_computed = 0
        self._block_size = block_size

    def step(self, num_tokens: int, **fields: object) -> SequenceStep:
        """Return the step of the next `num_tokens` tokens, and count them as computed."""
        start, stop = self.num_computed, min(self.num_computed + num_tokens, len(self.token_ids))
        self.num_computed = stop
        size = self._block_size
        slots = [self.block_table[i // size] * size + i % size for i in range(start, stop)]
        ids = self.token_ids[start:stop]
        return SequenceStep(ids, start, self.block_table, slots, **fields)  # type: ignore[arg-type]


class PagedModel:
    """A decoder over a pool whose blocks are handed out in random order."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_blocks: int = 256,
        block_size: int = 4,
        attention: Callable[[AttentionShape, KVCache], Attention] | None = None,
    ) -> None:
        self.block_size = block_size
        self._model = model
        shape = model.config.attention
        self.cache = KVCache(shape, num_blocks, block_size, model.dtype, model.device)
        # Garbage in free blocks must never be seen.
        for pool in (*self.cache.keys, *self.cache.values):
            pool.normal_(std=10.0, generator=torch.Generator().manual_seed(1))
        self._attention: Attention = (attention or TorchPagedAttention)(shape, self.cache)
        self._free = list(range(1, num_blocks))
        random.Random(0).shuffle(self._free)

    def sequence(self, token_ids: Sequence[int]) -> PagedSequence:
        num_blocks = -(-len(token_ids) // self.block_size)
        table, self._free = self._free[:num_blocks], self._free[num_blocks:]
        return PagedSequence(token_ids, table, self.block_size)

    @torch.inference_mode()
    def logits(self, steps: Sequence[SequenceStep]) -> list[Tensor]:
        """Run one forward over all steps -> (tokens of the step, vocab_size) for each."""
        order = attention_order(steps)
        sequences = [steps[index] for index in order]
        batch = build_batch(sequences, self._attention, self._model.device, self.block_size)
        logits = self._model.decoder.logits(self._model.decoder.forward(batch, self._attention)).float()
        parts = logits.split([len(sequence.token_ids) for sequence in sequences])
        return [part for _, part in sorted(zip(order, parts, strict=True), key=lambda pair: pair[0])]

    def chunked(self, token_ids: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return the logits of a sequence in chunks of the given sizes, of which the last repeats."""
        sequence, parts, index = self.sequence(token_ids), [], 0
        while sequence.num_computed < len(token_ids):
            parts += self.logits([sequence.step(sizes[min(index, len(sizes) - 1)])])
            index += 1
        return torch.cat(parts)
