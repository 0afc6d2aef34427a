"""Runs steps: block copies, one forward over all sequences, logits where they are needed, and the draws."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from worker.attention.kv_cache import KVCache
from worker.attention.select import select_attention
from worker.model.llama import LlamaDecoder
from worker.model.load import LoadedModel
from worker.runner.batch import Batch, BatchedSequence, build_batch
from worker.runner.graphs import DecodeGraphs, RecordableAttention, cuda_recorder
from worker.sampling.errors import NonFiniteLogits
from worker.sampling.logprobs import token_logprobs
from worker.sampling.sampler import sample
from worker.step import Draw, Drawn, SequenceResult, SequenceStep, Step
from worker.wire import TokenLogprobs

logger = logging.getLogger(__name__)

_LOGPROB_ROWS: Final = 256
"""Prompt logprobs need a row of the vocabulary's size per token: this many are held at a time."""


class ModelRunner:
    """A `worker.step.Runner` over one decoder and one KV pool."""

    __slots__ = ("_attention", "_cache", "_decoder", "_device", "_eos_token_ids", "_graphs", "numerics")

    def __init__(self, model: LoadedModel, *, num_blocks: int, block_size: int, eos_token_ids: Sequence[int]) -> None:
        """`eos_token_ids` are hidden from draws before min_tokens. Allocates the pool of `num_blocks` blocks."""
        self._decoder = model.decoder
        self._device = model.device
        self._eos_token_ids = tuple(eos_token_ids)
        shape = model.config.attention
        self._cache = KVCache(shape, num_blocks, block_size, model.dtype, model.device)
        self._attention = select_attention(shape, self._cache, deterministic=model.options.deterministic)
        self._graphs = self._record(model, min(model.config.max_model_len, (num_blocks - 1) * block_size))
        self.numerics = f"{model.numerics}/{self._attention.name}"

    @property
    def cache(self) -> KVCache:
        return self._cache

    @torch.inference_mode()
    def run(self, step: Step) -> list[SequenceResult]:
        """One result per sequence of the step, in its order. Raises SamplingError."""
        self._cache.copy_blocks(step.copies)
        if not step.sequences:
            return []
        if (results := self._replay(step.sequences)) is not None:
            return results
        batch = build_batch(step, self._attention, self._device, self._cache.block_size)
        hidden = self._decoder.forward(batch.forward, self._attention)
        drawn = self._draw(batch, hidden)
        results = [SequenceResult()] * len(batch.sequences)
        for sequence, tokens in zip(batch.sequences, drawn, strict=True):
            results[sequence.index] = SequenceResult(tokens, self._prompt_logprobs(sequence, hidden))
        return results

    def _draw(self, batch: Batch, hidden: Tensor) -> list[tuple[Drawn, ...]]:
        """The draws of each sequence, from the logits of its last token."""
        drawing = [sequence for sequence in batch.sequences if sequence.step.draws]
        if not drawing:
            return [()] * len(batch.sequences)
        if len(drawing) < len(hidden):
            hidden = hidden[torch.tensor([sequence.stop - 1 for sequence in drawing], device=self._device)]
        logits = self._decoder.logits(hidden)
        draws = [draw for sequence in drawing for draw in sequence.step.draws]
        if len(draws) > len(drawing):
            repeats = torch.tensor([len(sequence.step.draws) for sequence in drawing], device=self._device)
            logits = logits.repeat_interleave(repeats, dim=0)
        tokens = iter(self._sample(logits, draws, [sequence.step for sequence in batch.sequences]))
        return [tuple(next(tokens) for _ in sequence.step.draws) for sequence in batch.sequences]

    def _sample(self, logits: Tensor, draws: Sequence[Draw], sequences: Sequence[SequenceStep]) -> list[Drawn]:
        try:
            return sample(logits, draws, self._eos_token_ids)
        except NonFiniteLogits:
            for sequence in sequences:
                self._cache.scrub(sequence.block_table)
            raise

    def _record(self, model: LoadedModel, max_model_len: int) -> DecodeGraphs | None:
        """Decodes of our own models on a GPU; others may do on the host what a recording would not repeat."""
        if self._device.type != "cuda" or not isinstance(model.decoder, LlamaDecoder):
            return None
        if not isinstance(self._attention, RecordableAttention):
            return None
        try:
            with torch.inference_mode():
                return DecodeGraphs(
                    model.decoder,
                    self._attention,
                    self._device,
                    block_size=self._cache.block_size,
                    max_model_len=max_model_len,
                    record=cuda_recorder(),
                )
        except RuntimeError as error:
            logger.warning("decodes are launched kernel by kernel: CUDA graphs cannot be recorded: %s", error)
            return None

    def _replay(self, sequences: Sequence[SequenceStep]) -> list[SequenceResult] | None:
        """A step of decodes alone through its recording; None: it has to be run."""
        if self._graphs is None or any(len(s.draws) != 1 or s.num_prompt_logprobs is not None for s in sequences):
            return None
        if (logits := self._graphs.logits(sequences)) is None:
            return None
        drawn = self._sample(logits, [sequence.draws[0] for sequence in sequences], sequences)
        return [SequenceResult((token,)) for token in drawn]

    def _prompt_logprobs(self, sequence: BatchedSequence, hidden: Tensor) -> tuple[TokenLogprobs, ...]:
        num_top = sequence.step.num_prompt_logprobs
        if num_top is None:
            return ()
        next_ids, first = sequence.step.next_token_ids, sequence.first
        found: list[TokenLogprobs] = []
        for start in range(0, len(next_ids), _LOGPROB_ROWS):
            ids = next_ids[start : start + _LOGPROB_ROWS]
            logits = self._decoder.logits(hidden[first + start : first + start + len(ids)])
            found += token_logprobs(logits, ids, [num_top] * len(ids))
        return tuple(found)
